"""A needle in a long context: is it found when single queries see some of the blocks only?

Synthetic: 8 heads of 128, keys of unit noise; the needle is one token whose key lies in the
direction of the query, at ``--strength`` standard deviations of the scores. Found means that its
block is among the selected ones. Printed for both selectors: recall against the share attended.

With ``--real``, instead, the demo's small model, where it is in the user's model folder: a sentence
with a number is planted in a long text at several depths; after its beginning the model must name
the number. Full-attention layers see the best blocks of the prefix only; windows are what they are.
Recall is the share of needles of which the first four tokens are those that dense attention gives,
among those that dense attention finds at all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pion_vllm_mlx
from pion_vllm_mlx import config
from pion_vllm_mlx.kernels import api

from .common import arguments, report

HEADS, DIM, BLOCK = 8, 128, 64
TOPS = (1, 2, 4, 8, 16, 32, 64, 128)
#: of the real model, whose context has about 48 blocks of half the size
REAL_TOPS = (1, 2, 4, 8, 16)
SELECTORS = {"block_mean": "mean", "quest": "quest"}
NEEDLE = " The secret number of the harbour is"
TEXT = Path(pion_vllm_mlx.__file__).parent / "demo" / "harbour.txt"

Floats = NDArray[np.float32]


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="length of the context")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--strength", type=float, nargs="+", default=[8.0, 12.0, 16.0, 24.0])
    parser.add_argument(
        "--real", action="store_true", help="the demo's model; says on stderr how far it is"
    )
    parser.add_argument("--real-tokens", type=int, default=1536)
    return parser.parse_args()


@dataclass(frozen=True)
class Haystack:
    """Keys ``[H, N, D]`` of noise, and queries in whose direction a needle can be put."""

    keys: Floats
    random: np.random.Generator

    def trial(self, strength: float) -> tuple[Floats, int, Floats]:
        """A query ``[H, D]``, where its needle is, and the key that the needle replaced."""
        q = self.random.standard_normal((HEADS, DIM), "f4")
        at = int(self.random.integers(self.keys.shape[1]))
        replaced = self.keys[:, at].copy()
        direction = q / np.linalg.norm(q, axis=1, keepdims=True)
        self.keys[:, at] = strength * direction
        return q, at, replaced


def synthetic(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Recall by selector, strength and share attended."""
    random = np.random.default_rng(1)
    hay = Haystack(random.standard_normal((HEADS, given.tokens, DIM), "f4"), random)
    found: dict[tuple[str, float, int], int] = {}
    for strength in given.strength:
        for _ in range(given.trials):
            q, at, replaced = hay.trial(strength)
            # a new prefix: statistics of blocks are remembered with it
            prefix = api.Prefix(hay.keys, hay.keys, given.tokens)
            for name, selector in SELECTORS.items():
                for top in TOPS:
                    chosen = api.Selection(BLOCK, top, selector)  # type: ignore[arg-type]
                    blocks = api.select_blocks(q, prefix, chosen)
                    hit = at // BLOCK in blocks
                    found[name, strength, top] = found.get((name, strength, top), 0) + hit
            hay.keys[:, at] = replaced
    return [
        {
            "selector": name,
            "strength": strength,
            "recall_by_share": {
                f"{100 * top * BLOCK / given.tokens:.2f}%": round(
                    found[name, strength, top] / given.trials, 3
                )
                for top in TOPS
            },
        }
        for name in SELECTORS
        for strength in given.strength
    ]


def real(given: argparse.Namespace) -> list[dict[str, Any]] | str:
    """Recall of the small model, or why it was not asked."""
    from pion_vllm_mlx.demo import model as demo

    folder = config.model_dir() / f"{demo.GEMMA_3_270M.name}-float32"
    if demo.damage(folder, demo.GEMMA_3_270M) is not None:
        return "the demo's model is not in the user's model folder"
    from .sparse_needle_model import Reader

    reader = Reader(folder, TEXT.read_text(), given.real_tokens)
    return reader.recall(NEEDLE, BLOCK // 2, REAL_TOPS, list(SELECTORS))


def main() -> None:
    given = options()
    figures: dict[str, Any]
    if given.real:
        figures = {"real_tokens": given.real_tokens, "real": real(given)}
        report("sparse_needle-real", given, figures, "mlx", "mlx-lm")
        return
    figures = {"tokens": given.tokens, "trials": given.trials, "block_tokens": BLOCK}
    report("sparse_needle", given, {**figures, "synthetic": synthetic(given)})


if __name__ == "__main__":
    main()
