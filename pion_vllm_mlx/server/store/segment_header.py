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
    return -(-max(1024, tensors * TENSOR_HEADER_BYTES) // 512) * 512


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
    """The safetensors header, padded so that data begins at ``data_start``.

    Raises ValueError when it does not fit.
    """
    entries = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [
                tensor.offset - data_start,
                tensor.offset + tensor.length - data_start,
            ],
        }
        for tensor in _with_fillers(tensors, data_start, end)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = data_start - LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"segment header of {len(text)} bytes does not fit {room}")
    return _LENGTH.pack(room) + text.ljust(room)
