"""The header of a segment file: a safetensors header in room that was reserved for it.

safetensors allows no gaps: dead bytes are named, as tensors of type U8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LENGTH = struct.Struct("<Q")
#: what stands before the header's text.
LENGTH_BYTES = _LENGTH.size
#: bytes of header JSON to count for one tensor, its name and a filler beside it.
TENSOR_HEADER_BYTES = 260
#: headers end at multiples of this, so that data lie in the file as they are aligned.
_HEADER_UNIT = 512


@dataclass(frozen=True)
class Tensor:
    """One entry of a segment's header: ``length`` bytes at ``offset`` of the file."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    length: int


def header_bytes_for(tensors: int) -> int:
    """Header space for a segment whose number of tensors is known, a multiple of 512."""
    return -(-max(1024, tensors * TENSOR_HEADER_BYTES) // _HEADER_UNIT) * _HEADER_UNIT


def _with_fillers(tensors: Iterable[Tensor], start: int, end: int) -> Iterator[Tensor]:
    """The tensors in file order, every gap from ``start`` to ``end`` named."""
    at = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.length)):
        if tensor.offset > at:
            gap = tensor.offset - at
            yield Tensor(f"dead.{at}", "U8", [gap], at, gap)
        yield tensor
        at = tensor.offset + tensor.length
    if end > at:
        yield Tensor(f"dead.{at}", "U8", [end - at], at, end - at)


def build_header(tensors: Iterable[Tensor], data_start: int, end: int) -> bytes:
    """The safetensors header of a file in which nothing lives before ``data_start``.

    It is as short as its entries allow: what is left of the room for it is a dead tensor, of
    which nothing is written. Raises ValueError when it does not fit.
    """
    tensors = list(tensors)
    begin = 0
    while True:
        text = _header_text(tensors, begin, end)
        needed = LENGTH_BYTES + len(text)
        if needed <= begin:
            return _LENGTH.pack(begin - LENGTH_BYTES) + text.ljust(begin - LENGTH_BYTES)
        if begin == data_start:
            raise ValueError(f"segment header of {needed} bytes does not fit {data_start}")
        begin = min(-(-needed // _HEADER_UNIT) * _HEADER_UNIT, data_start)


def _header_text(tensors: Iterable[Tensor], begin: int, end: int) -> bytes:
    """The entries as JSON, for data that begin at ``begin``."""
    entries = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.offset - begin, tensor.offset + tensor.length - begin],
        }
        for tensor in _with_fillers(tensors, begin, end)
    }
    return json.dumps(entries, separators=(",", ":")).encode()
