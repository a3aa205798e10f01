"""The small real model asked for a number that was planted in its context."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load

from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)

DEPTHS = (0.1, 0.35, 0.6)
NUMBERS = ("7421", "3856")


def _tell(line: str) -> None:
    """How far it is: a run takes minutes."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


class Reader:
    """Reads a text with a needle once for each depth and number."""

    def __init__(self, folder: Path, text: str, num_tokens: int) -> None:
        self.model, self.tokenizer = load(str(folder))[:2]
        self._text: list[int] = list(self.tokenizer.encode(text))
        while len(self._text) < num_tokens:
            self._text += self._text[1:]
        self._text = self._text[:num_tokens]

    def recall(
        self, needle: str, block: int, tops: Sequence[int], selectors: Sequence[str]
    ) -> list[dict[str, Any]]:
        """By selector: the share of needles found by the share of the context attended."""
        install_pion_attention_patch()
        try:
            hits: dict[tuple[str, int], int] = {}
            asked = 0
            with PionPromptCache(self.model, url="tcp://127.0.0.1:1") as pc:
                for number, depth in ((n, d) for n in NUMBERS for d in DEPTHS):
                    ids, question, answer = self._planted(needle, number, depth)
                    pc.get_or_prefill(ids, f"{number} {depth}")
                    dense = self._said(pc, ids, f"{number} {depth}", question, None)
                    found = dense[0] == answer
                    _tell(f"{number} at {depth}: {'found' if found else 'missed'} densely")
                    if not found:
                        continue
                    asked += 1
                    for selector in selectors:
                        for top in tops:
                            mode = {"K_block": block, "K_blocks": top, "selector": selector}
                            said = self._said(pc, ids, f"{number} {depth}", question, mode)
                            hits[selector, top] = hits.get((selector, top), 0) + (said == dense)
                            _tell(f"  {selector}, {top} blocks: {said == dense}")
        finally:
            uninstall_pion_attention_patch()
        return [self._line(selector, asked, hits, block, tops) for selector in selectors]

    def _line(
        self,
        selector: str,
        asked: int,
        hits: dict[tuple[str, int], int],
        block: int,
        tops: Sequence[int],
    ) -> dict[str, Any]:
        shares = {
            f"{min(100.0, 100 * top * block / len(self._text)):.1f}%": round(
                hits.get((selector, top), 0) / max(1, asked), 3
            )
            for top in tops
        }
        return {"selector": selector, "found_densely": asked, "recall_by_share": shares}

    def _planted(self, needle: str, number: str, depth: float) -> tuple[list[int], list[int], int]:
        """The context, the beginning of the needle's sentence, and its first new token."""
        start = list(self.tokenizer.encode(needle, add_special_tokens=False))
        whole = list(self.tokenizer.encode(f"{needle} {number}.", add_special_tokens=False))
        at = int(depth * len(self._text))
        planted = [*self._text[:at], *whole, *self._text[at:]]
        told = list(self.tokenizer.encode(f"{needle} {number}", add_special_tokens=False))
        common = len(start)
        # the blank before the number may be a token of its own: the digit is what is asked
        while common < len(told) and not self.tokenizer.decode([told[common]]).strip():
            common += 1
        return planted, told[:common], told[common]

    def _said(
        self,
        pc: PionPromptCache,
        ids: list[int],
        name: str,
        question: list[int],
        mode: dict[str, Any] | None,
    ) -> list[int]:
        """The first tokens after the question, each of its tokens a query of its own."""
        cache = make_pion_prompt_cache(self.model, name, pc, len(ids), mode)
        for token in question[:-1]:
            mx.eval(self.model(mx.array([[token]]), cache=cache))
        said = [question[-1]]
        for _ in range(4):
            logits = self.model(mx.array([said[-1:]]), cache=cache)
            said.append(int(mx.argmax(logits[0, -1])))
        return said[1:]
