"""From one wire form of rows to another: float16 in and out, head-major layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats.base import Bytes, Format, Part


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
    head = kind.per_head(heads)
    head_parts = head.parts(width // heads)
    n = rows.shape[0 if to_head_major else 1]
    if to_head_major:
        token_major, head_major = (
            rows,
            np.empty((heads, n, head.row_bytes(width // heads)), np.uint8),
        )
    else:
        token_major, head_major = np.empty((n, kind.row_bytes(width)), np.uint8), rows
    by_token = _cut(token_major, kind.parts(width))
    by_head = _cut(head_major, head_parts)
    for tokens, of_heads, part in zip(by_token, by_head, head_parts, strict=True):
        unit = _unit(part.bytes_per_row)
        of_heads = of_heads.view(unit)
        # Cutting the last axis of a view is a view: writing to it writes to the rows.
        tokens = tokens.view(unit).reshape(n, heads, of_heads.shape[2]).transpose(1, 0, 2)
        if to_head_major:
            of_heads[...] = tokens
        else:
            tokens[...] = of_heads
    return head_major if to_head_major else token_major


def _unit(row_bytes: int) -> type[np.unsignedinteger[Any]]:
    """The widest unit that divides a row: numpy copies single bytes four times slower."""
    for unit in (np.uint64, np.uint32, np.uint16):
        if row_bytes % np.dtype(unit).itemsize == 0:
            return unit
    return np.uint8


def _cut(rows: Bytes, parts: tuple[Part, ...]) -> list[Bytes]:
    """Views of the last axis, one a part."""
    arrays, at = [], 0
    for part in parts:
        arrays.append(rows[..., at : at + part.bytes_per_row])
        at += part.bytes_per_row
    return arrays
