"""Whether a safetensors file is all there: its header says where its last byte is."""

from __future__ import annotations

import json
import struct
from pathlib import Path

_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000


def cut_short(path: Path) -> str:
    """What is missing of a safetensors file, in words; empty for one that is whole, or is none.

    Raises OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return f"it is cut short: {size} bytes are there, not even its header is whole"
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_HEADER_BYTES:
            return ""
        text = file.read(length)
    if len(text) < length:
        if not b"{".startswith(text[:1]):
            return ""
        return f"it is cut short: {size} bytes are there, its header alone has {length}"
    try:
        tensors = json.loads(text)
        ends = [int(t["data_offsets"][1]) for n, t in tensors.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""
    whole = _LENGTH.size + length + max(ends, default=0)
    return f"it is cut short: {size:,} of its {whole:,} bytes are there" if size < whole else ""
