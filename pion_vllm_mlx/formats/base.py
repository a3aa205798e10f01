"""What a storage format is.

W is a row's width in values, n a number of rows. A *wire row* is one row in the
form in which it travels with ``FMT STORED``; a stored run keeps the same bytes as
one array per :class:`Part`. All multi-byte numbers are little endian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

# Rows are converted in runs of about this many values: temporaries stay in the
# processor's cache, and small next to the rows.
_RUN_VALUES = 64 * 1024


@dataclass(frozen=True)
class Part:
    """One tensor of a stored run.

    ``suffix`` goes behind the run's tensor name ("" | ".w" | ".s" | ".b"), ``dtype``
    is safetensors' name, and a row has ``items_per_row`` items of it.
    """

    suffix: str
    dtype: str
    bytes_per_row: int
    items_per_row: int


class Format(ABC):
    """How rows of float32 values become stored bytes, and come back.

    Every row is converted by itself: its bytes depend on its values alone.
    ``block`` is the number of values that share parameters: a width has to be its multiple.
    Formats are immutable and may be used from any thread.
    """

    name: str
    block = 1

    @abstractmethod
    def row_bytes(self, width: int) -> int:
        """Bytes of one wire row of ``width`` values; 0 for width 0."""

    @abstractmethod
    def parts(self, width: int) -> tuple[Part, ...]:
        """The tensors of a stored run, in the order of the wire row."""

    @abstractmethod
    def _encode(self, rows: Floats, out: Bytes) -> None:
        """Write the wire rows ``[n, row_bytes]`` of ``rows [n, W]`` into ``out``."""

    @abstractmethod
    def _decode(self, stored: Bytes, out: Floats) -> None:
        """Write the values of wire rows ``[n, row_bytes]`` into ``out [n, W]``."""

    @abstractmethod
    def width_of(self, row_bytes: int) -> int:
        """The width whose wire row has ``row_bytes``; inverse of :meth:`row_bytes`."""

    def per_head(self, heads: int) -> Format:
        """The format of one head's share of a row; itself, but for opaque rows."""
        return self

    def head_major(self, width: int, heads: int) -> bool:
        """Whether a run may be kept ``[heads, n, width / heads]`` (LAYOUT HND)."""
        return heads > 0 and width % heads == 0 and (width // heads) % self.block == 0

    def encode(self, rows: Floats) -> Bytes:
        """``[n, W]`` float32 to wire rows ``[n, row_bytes]`` uint8.

        Raises CommandError where a quantized format meets a value that is not
        finite or overflows a stored parameter.
        """
        n, width = rows.shape
        self.check_width(width)
        out = np.empty((n, self.row_bytes(width)), np.uint8)
        if width:
            for run in _runs(n, width):
                self._encode(rows[run], out[run])
        return out

    def decode(self, stored: Bytes) -> Floats:
        """Wire rows ``[n, row_bytes]`` uint8 to ``[n, W]`` float32.

        Raises CommandError where no width has rows of so many bytes.
        """
        n, row_bytes = stored.shape
        width = self.width_of(row_bytes)
        if self.row_bytes(width) != row_bytes:
            raise CommandError(f"{self.name}: no row has {row_bytes} bytes")
        out = np.empty((n, width), np.float32)
        if width:
            for run in _runs(n, width):
                self._decode(stored[run], out[run])
        return out

    def split(self, wire: Bytes) -> list[Bytes]:
        """Wire rows ``[n, row_bytes]`` to one array ``[n, bytes_per_row]`` a part.

        The arrays are views of ``wire``, contiguous only where there is one part.
        """
        arrays, at = [], 0
        for part in self.parts(self.width_of(wire.shape[1])):
            arrays.append(wire[:, at : at + part.bytes_per_row])
            at += part.bytes_per_row
        return arrays

    def join(self, parts: list[Bytes]) -> Bytes:
        """One array a part to wire rows; with one part the same array comes back."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def check_width(self, width: int) -> None:
        """Raise CommandError for a width that this format cannot hold."""
        if width < 0 or width % self.block:
            raise CommandError(f"{self.name}: width must be a multiple of {self.block}")


class FloatFormat(Format):
    """One floating point number a value, of ``item_bytes`` bytes, by safetensors' name."""

    item_bytes: int
    dtype: str

    def row_bytes(self, width: int) -> int:
        """So many bytes a value."""
        return self.item_bytes * width

    def width_of(self, row_bytes: int) -> int:
        """A value for so many bytes."""
        return row_bytes // self.item_bytes

    def parts(self, width: int) -> tuple[Part, ...]:
        """One tensor."""
        return (Part("", self.dtype, self.item_bytes * width, width),)


def _runs(n: int, width: int) -> list[slice]:
    step = max(1, _RUN_VALUES // width)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def row_range(name: str, rows: Floats, axis: int = -1) -> tuple[Floats, Floats]:
    """Smallest and largest value along an axis, kept with length 1.

    Raises CommandError where a value is not finite. A zero comes back without sign,
    so that the result does not depend on the order of the comparison.
    """
    with np.errstate(invalid="ignore"):
        low = rows.min(axis=axis, keepdims=True) + np.float32(0)
        high = rows.max(axis=axis, keepdims=True) + np.float32(0)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise CommandError(f"{name}: rows hold a value that is not finite")
    return low, high
