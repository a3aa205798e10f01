"""What every storage format costs in space, error and time.

Rows of N tokens and D values: Gaussian with sigma 0.6 for errors and cosine, uniform in
[-1, 1] for the largest error. Rates are GB/s of float32 rows, one thread, formats in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.reproducers.common import alternate, arguments, rates, report
from pion_vllm_mlx.formats import BF16_ROPE_FP8_BODY, FORMATS, Format, get_format

SIGMA = 0.6
BITS_OF_FP16 = 16

Floats = NDArray[np.float32]


def gaussian(tokens: int, width: int) -> Floats:
    """Rows ``[tokens, width]``, float32."""
    rows = np.random.default_rng(0).standard_normal((tokens, width)) * SIGMA
    return rows.astype(np.float32)


def uniform(tokens: int, width: int) -> Floats:
    """Rows ``[tokens, width]``, float32."""
    return np.random.default_rng(1).uniform(-1, 1, (tokens, width)).astype(np.float32)


def errors(kind: Format, rows: Floats) -> tuple[float, float, float]:
    """Mean and largest absolute error, and the cosine of all values together."""
    back = kind.decode(kind.encode(rows)).astype(np.float64)
    exact = rows.astype(np.float64)
    difference = np.abs(back - exact)
    x, y = back.ravel(), exact.ravel()
    cosine = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    return float(difference.mean()), float(difference.max()), cosine


def quality(kind: Format, tokens: int, width: int) -> dict[str, float]:
    """Bytes and errors of one format."""
    mean, largest, cosine = errors(kind, gaussian(tokens, width))
    _, largest_uniform, _ = errors(kind, uniform(tokens, width))
    row_bytes = kind.row_bytes(width)
    return {
        "row_bytes": row_bytes,
        "ratio_to_fp16": round(width * BITS_OF_FP16 / 8 / row_bytes, 3),
        "mean_error": round(mean, 7),
        "max_error": round(largest, 7),
        "max_error_uniform": round(largest_uniform, 7),
        "cosine": round(cosine, 7),
    }


def speeds(kinds: dict[str, Format], rows: Floats, pairs: int) -> dict[str, dict[str, Any]]:
    """Encode and decode rates of every format."""
    sides: dict[str, Callable[[], Any]] = {}
    for name, kind in kinds.items():
        wire = kind.encode(rows)
        sides[f"{name} encode"] = partial(kind.encode, rows)
        sides[f"{name} decode"] = partial(kind.decode, wire)
    seconds = alternate(sides, pairs)
    found: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for side, values in seconds.items():
        name, _, way = side.rpartition(" ")
        found[name][f"{way}_gb_s"] = rates(rows.nbytes, values)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="rows")
    parser.add_argument("--width", type=int, default=512, help="values of a row, H_kv * D")
    parser.add_argument(
        "--rope", type=int, default=64, help=f"rotary values of {BF16_ROPE_FP8_BODY}"
    )
    options = parser.parse_args()
    kinds = {**FORMATS}
    body = get_format(f"{BF16_ROPE_FP8_BODY}:{options.rope}")
    kinds[body.name] = body
    rows = gaussian(options.tokens, options.width)
    rate = speeds(kinds, rows, options.pairs)
    figures = {
        name: {**quality(kind, options.tokens, options.width), **rate[name]}
        for name, kind in kinds.items()
    }
    report("formats", options, {"tokens": options.tokens, "width": options.width, **figures})


if __name__ == "__main__":
    main()
