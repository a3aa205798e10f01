"""From one wire form of rows to another: float16 in and out, head-major layout."""

from __future__ import annotations

import numpy as np

from ..errors import CommandError
from .base import Bytes, Format, Part


def f16_to(target: Format, rows: Bytes) -> Bytes:
    """Rows of f16 bytes ``[n, 2·W]`` as wire rows of ``target``.

    The same array comes back for fp16: every bit pattern is kept. Raises
    CommandError as :meth:`Format.encode` does.
    """
    if target.name == "fp16":
        return rows
    return target.encode(np.ascontiguousarray(rows).view("<f2").astype(np.float32))


def to_f16(source: Format, rows: Bytes) -> Bytes:
    """Wire rows of ``source`` as rows of f16 bytes ``[n, 2·W]``, for exports."""
    if source.name == "fp16":
        return rows
    with np.errstate(over="ignore", invalid="ignore"):
        return source.decode(rows).astype("<f2").view(np.uint8)


def transpose_rows(
    kind: Format, rows: Bytes, width: int, heads: int, *, to_head_major: bool
) -> Bytes:
    """Wire rows of a run in the other layout, as a new contiguous array.

    Token-major is ``[n, row_bytes]``; head-major ``[heads, n, head_row_bytes]``, one
    wire row of ``width / heads`` values a head and token. Raises CommandError for a
    format whose rows can't be cut at heads.
    """
    if not kind.head_major(width, heads):
        raise CommandError(f"{kind.name}: rows of width {width} have no layout HND")
    head_parts = kind.per_head(heads).parts(width // heads)
    if to_head_major:
        n = rows.shape[0]
        pieces = [
            array.reshape(n, heads, part.bytes_per_row).transpose(1, 0, 2)
            for array, part in zip(_cut(rows, kind.parts(width)), head_parts, strict=True)
        ]
        return np.concatenate(pieces, axis=2)
    n = rows.shape[1]
    pieces = [
        array.transpose(1, 0, 2).reshape(n, heads * array.shape[2])
        for array in _cut(rows, head_parts)
    ]
    return np.concatenate(pieces, axis=1)


def _cut(rows: Bytes, parts: tuple[Part, ...]) -> list[Bytes]:
    """Views of the last axis, one a part."""
    arrays, at = [], 0
    for part in parts:
        arrays.append(rows[..., at : at + part.bytes_per_row])
        at += part.bytes_per_row
    return arrays
