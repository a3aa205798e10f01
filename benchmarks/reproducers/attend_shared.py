"""What it costs on the processor to attend to rows that conversations share, in blocks of 64.

Two conversations have their first three quarters in common. One of them is attended as it lies by
itself, and through the block table of the pool that ``paging`` makes of both: queries of one
token and of 16, and sparse ones, 8 heads of 128, float32. Answers of both are compared first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Prefix, Selection
from pion_vllm_mlx.kernels.paging import pooled

from .common import alternate, arguments, milliseconds, paired_ratio, report

HEADS, DIM = 8, 128
LENGTHS = (2048, 16_384)
TIMES = 10
SPARSE = Selection(64, 8)

Ask = Callable[[Prefix], Any]


def conversations(rng: np.random.Generator, tokens: int) -> tuple[Prefix, Prefix]:
    """One by itself, and the same over blocks that another has, too."""
    sides = [rng.standard_normal((HEADS, tokens, DIM), "f4") for _ in range(2)]
    other = [side.copy() for side in sides]
    for side in other:
        side[:, tokens * 3 // 4 :] = rng.standard_normal((HEADS, tokens // 4, DIM), "f4")
    alone = Prefix(*other, tokens)
    _, shared = pooled([Prefix(*sides, tokens), alone]).prefixes
    return alone, shared


def compared(pairs: int, alone: Prefix, shared: Prefix, ask: Ask) -> dict[str, Any]:
    """Milliseconds of an answer either way, and the ratio pair by pair."""
    np.testing.assert_allclose(ask(shared).out, ask(alone).out, rtol=0, atol=1e-5)

    def times(prefix: Prefix) -> Callable[[], None]:
        def run() -> None:
            for _ in range(TIMES):
                ask(prefix)

        return run

    took = alternate({"alone": times(alone), "shared": times(shared)}, pairs)
    each = {name: [one / TIMES for one in seconds] for name, seconds in took.items()}
    ratio = paired_ratio(each["shared"], each["alone"])
    return {"ratio": ratio, **{f"{name}_ms": milliseconds(one) for name, one in each.items()}}


def main() -> None:
    options = arguments(__doc__).parse_args()
    rng = np.random.default_rng(64)
    found = {}
    for tokens in LENGTHS:
        alone, shared = conversations(rng, tokens)
        one, several = (rng.standard_normal((HEADS, rows, DIM), "f4") for rows in (1, 16))
        asks: dict[str, Ask] = {
            "one token": lambda prefix, q=one: api.attend(q, prefix),
            "16 tokens": lambda prefix, q=several: api.attend(q, prefix),
            "sparse": lambda prefix, q=one: api.attend_sparse_auto(q[:, 0], prefix, SPARSE),
        }
        found[f"N={tokens}"] = {
            name: compared(options.pairs, alone, shared, ask) for name, ask in asks.items()
        }
    report("attend_shared", options, found)


if __name__ == "__main__":
    main()
