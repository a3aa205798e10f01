"""One stored byte turned over, in a copy of a data folder."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_vllm_mlx.errors import DamagedData

# Filler between runs is U8 by format; the demo's rows are not.
FILLER_DTYPE = "U8"


@dataclass(frozen=True)
class FlippedByte:
    """Which byte was turned over: the offset counts from the start of the file."""

    file: str
    tensor: str
    offset: int


def flip_stored_byte(folder: Path) -> FlippedByte:
    """Turn over one bit in the rows of the largest tensor of all segments under ``folder``.

    Raises DamagedData if no sealed segment holds rows.
    """
    largest: tuple[int, Path, str, int] | None = None
    for path in sorted(p for p in folder.glob("pion.segments.*/**/*") if p.is_file()):
        for name, start, size in _row_tensors(path):
            if largest is None or size > largest[0]:
                largest = (size, path, name, start)
    if largest is None:
        raise DamagedData(f"no sealed segment with rows in {folder}")
    _, path, name, start = largest
    # The first row of a run is live in every layout; spare rows are at its end.
    with open(path, "r+b") as file:
        file.seek(start)
        byte = file.read(1)
        file.seek(start)
        file.write(bytes([byte[0] ^ 0x01]))
    return FlippedByte(str(path.relative_to(folder)), name, start)


def _row_tensors(path: Path) -> list[tuple[str, int, int]]:
    """Name, first byte in the file and bytes of every tensor of rows; none if not sealed."""
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return []
        (length,) = struct.unpack("<Q", prefix)
        if not 2 <= length <= path.stat().st_size - 8:
            return []
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            return []
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] != FILLER_DTYPE:
            start, end = entry["data_offsets"]
            tensors.append((name, 8 + length + start, end - start))
    return tensors
