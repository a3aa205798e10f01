"""Prompts of every length, over HTTP: the tokens of a run without a cache, and the reuse it says.

Each is asked for, asked for again and gone on with; after a kill it is asked for once more, or
gone on with in another way.  What was to be reused is asserted to the token, and that it did
not go through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.models import WINDOW
from tests.serve.served import ROWS, SEEDED, STATES, Served, serving

pytest.importorskip("mlx_lm")

#: around the least gain and a window (16), a block (64), and from where on there is a guard (256).
SOME = (1, 2, 15, 16, 17, 18, 32, 33, 63, 64, 65, 128, 129, 200, 255, 257, 273, 513)
EACH = (*range(1, 201), *(length for length in SOME if length > 200))
MIN_GAIN = 16
TEXT = "The quick brown fox jumps over the lazy dog, and naps in the shade of an old oak. " * 8
#: what prompts begin with, each with another: they share nothing in memory.
FIRST = [chr(code) for code in range(ord("!"), ord("~"))]
WAYS: dict[str, dict[str, Any]] = {"batched": {}, "single": SEEDED}


@pytest.fixture(scope="module", params=[*ROWS, *STATES])
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    """One engine a family, over a server of its own; nothing is read before it is asked for."""
    folder = tmp_path_factory.mktemp("engine")
    with serving(folder, request.param, "--pion-preload-gb", "0") as running:
        yield running


@dataclass
class Prompt:
    """One prompt, and what was answered: ``made`` tokens, the first one ``said``."""

    text: str
    said: int = 0
    made: int = 0

    def longer(self, served: Served, tails: str) -> str:
        """The prompt with a tail that does not begin as the reply did."""
        tail = next(one for one in tails if served.tokenizer.encode(one) != [self.said])
        return self.text + tail * 3


def prompts_of(lengths: Sequence[int], mark: str, firsts: Sequence[str]) -> list[Prompt]:
    """Prompts of these lengths; ``mark`` is what others with the same beginning do not have."""
    texts = (f"{first}{mark}{TEXT}" for first in firsts)
    return [Prompt(text[:length]) for text, length in zip(texts, lengths, strict=False)]


class Asked:
    """Prompts asked of an engine, each reply proved."""

    def __init__(self, served: Served, way: str) -> None:
        self.served = served
        self.family = served.engine.model.name
        self.how = WAYS[way]

    def ask(self, prompt: Prompt, text: str, expected: Sequence[int], tiers: Sequence[str]) -> None:
        """Asks for ``text``, of which one of ``expected`` is to be reused, from one of ``tiers``.

        What is reused of a quantized cache was rounded at the last token of the prompt.
        """
        size = len(prompt.text)
        reply = self.served.engine.complete(text, **self.how)
        at = sorted({end for end in (size - 1, reply.cached) if 0 < end <= reply.cached})
        self.served.proved(reply, self.served.tokenizer.encode(text), at)
        assert reply.cached in expected, (size, len(text), reply.receipt)
        assert not reply.cached or reply.receipt["tier"] in tiers, (size, reply.receipt)
        if text == prompt.text:
            prompt.said, prompt.made = reply.tokens[0], len(reply.tokens)

    def in_memory(self, prompt: Prompt) -> None:
        """Anew, once more, and gone on with."""
        size, tiers = len(prompt.text), ("memory",)
        self.ask(prompt, prompt.text, [0], ())
        self.ask(prompt, prompt.text, [size - 1], tiers)
        self.ask(prompt, prompt.longer(self.served, "~|"), self.going_on(prompt), tiers)

    def going_on(self, prompt: Prompt) -> list[int]:
        """What memory has of a prompt that another tail follows."""
        size = len(prompt.text)
        if self.family in STATES or (self.family == "gemma3_text" and size + prompt.made >= WINDOW):
            return [size - 1]
        return [size]

    def stored(self, prompt: Prompt, longer: bool, lanes: Sequence[str]) -> None:
        """Once more, or gone on with, in a process that has nothing of it in memory."""
        size = len(prompt.text)
        if not longer:
            self.ask(prompt, prompt.text, [size - 1 if size > MIN_GAIN else 0], lanes)
            return
        expected = [size] if size >= MIN_GAIN else [0]
        if self.family == "gemma3_text":  # the windows at its end and behind it, or at its end
            expected = [size - 1, size] if size > MIN_GAIN else [0, size * (size == MIN_GAIN)]
        elif self.family in STATES:
            expected = [size - 1 if size > MIN_GAIN else 0]
        self.ask(prompt, prompt.longer(self.served, "^`"), expected, lanes)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_of_a_prompt_of_any_length_what_was_computed_is_reused_and_the_reply_is_the_same(
    served: Served, way: str, long_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, engine = EACH if long_run else SOME, served.engine
    half = len(FIRST) // 2
    firsts = FIRST[:half] if way == "batched" else FIRST[half:]
    lanes = ("mapped", "stored")
    for part in range(0, len(lengths), half):
        prompts = prompts_of(lengths[part : part + half], chr(ord("A") + part // half), firsts)
        asked = Asked(served, way)
        for prompt in prompts:
            asked.in_memory(prompt)
        engine.until_stored()
        if way == "single":  # as on another machine
            monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
            lanes = ("stored",)
        engine.restart()
        for number, prompt in enumerate(prompts):
            asked.stored(prompt, (number + len(lanes)) % 2 == 0, lanes)
        if part + half < len(lengths):
            engine.restart()
