"""The server's segment files as KV.PREFIX.MAP names them: tensors, and where their bytes lie.

A tensor is taken for a run only if it carries the run's format, layout and checksum, which the
server has verified since it started. A file is opened once; one that is unlinked meanwhile stays
readable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache.completion import Run
from pion_vllm_mlx.cache.lanes_codec import FLOAT_DTYPES, decode_tensors
from pion_vllm_mlx.cache.store_client import missing
from pion_vllm_mlx.errors import DamagedData, StoreUnavailable

_DTYPES = {
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
}
"""Names of safetensors whose rows are read as they lie there."""

_LONGEST_HEADER = 100_000_000
"""MLX reads no longer one."""


def tensors_of(path: str) -> dict[str, mx.array]:
    """The lazy tensors of a safetensors file. Raises what MLX does, or StoreUnavailable."""
    loaded = mx.load(path, format="safetensors")
    if not isinstance(loaded, dict):
        raise StoreUnavailable(f"{path} holds no tensors")
    return loaded


def parts_of(loaded: Mapping[str, Any], name: str) -> list[Any]:
    """The tensors of one run: one, or codes, scales and biases. Raises KeyError."""
    if name in loaded:
        return [loaded[name]]
    return [loaded[f"{name}{suffix}"] for suffix in (".w", ".s", ".b")]


@dataclass(frozen=True)
class RowsInFile:
    """A head-major tensor ``[heads, padded_rows, dim]`` of an open file.

    ``offset`` is that of its first byte; the run begins with row ``first``.
    """

    file: int
    offset: int
    dtype: mx.Dtype
    heads: int
    padded_rows: int
    dim: int
    first: int

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.size

    def offset_of(self, head: int, row: int) -> int:
        """Of a row of the run, counted from its own beginning."""
        return self.offset + (head * self.padded_rows + self.first + row) * self.row_bytes


class _File:
    """An open segment file. Raises StoreUnavailable where it is not as the server said."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        if os.fstat(self.descriptor).st_size != size:
            os.close(self.descriptor)
            raise StoreUnavailable(f"{path} has another size than {size} bytes")

    @cached_property
    def header(self) -> tuple[dict[str, Any], int]:
        """Its safetensors header, and where the data begin."""
        length = int.from_bytes(os.pread(self.descriptor, 8, 0), "little")
        if length > _LONGEST_HEADER:
            raise StoreUnavailable(f"{self.path} is no safetensors file")
        try:
            return json.loads(os.pread(self.descriptor, length, 8)), 8 + length
        except ValueError as error:
            raise StoreUnavailable(f"{self.path}: its header is no JSON") from error

    def rows(self, name: str, first: int) -> RowsInFile | None:
        """Where the rows of a tensor lie; None for one that is not read as it lies there."""
        entries, start = self.header
        entry = entries.get(name)
        if entry is None or entry["dtype"] not in _DTYPES or len(entry["shape"]) != 3:
            return None
        dtype = _DTYPES[entry["dtype"]]
        begin, end = entry["data_offsets"]
        heads, padded, dim = entry["shape"]
        if prod(entry["shape"]) * dtype.size != end - begin:
            raise StoreUnavailable(f"{self.path}: {name} is not as long as its shape says")
        return RowsInFile(self.descriptor, start + begin, dtype, heads, padded, dim, first)


class MappedFiles:
    """The tensors that KV.PREFIX.MAP names, found by run.

    Raises KeyError, TypeError, IndexError or AttributeError for an answer of another shape.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._tensors: dict[tuple[int, str, int, int], tuple[str, dict[str, Any]]] = {}
        self._arrays: dict[str, dict[str, mx.array]] = {}
        self._files: dict[str, _File] = {}
        self._sizes: dict[str, int] = {}
        for segment in mapping["segments"]:
            self._sizes[segment["path"]] = segment["size"]
            for tensor in segment["tensors"]:
                place = (tensor["layer"], tensor["side"], tensor["start"], tensor["end"])
                self._tensors[place] = (segment["path"], tensor)

    def parts(self, run: Run) -> tuple[list[mx.array], int]:
        """The lazy tensors of a run, and its first row in them."""
        path, tensor = self._proved(run)
        return parts_of(self._open(path), tensor["name"]), int(tensor["row"])

    def rows(self, run: Run, leaf: dict[str, Any]) -> mx.array:
        """``[H, n_pad, D]`` lazily, beginning with the first row of the run."""
        tensors, first = self.parts(run)
        heads = int(leaf["heads"])
        array = decode_tensors(tensors, run, heads)
        if first:
            array = array[:, first:, :]
        if array.shape[0] != heads or array.shape[1] < run.rows:
            raise StoreUnavailable(f"leaf {run.layer} {run.side}: a tensor of another shape")
        return array

    def in_file(self, run: Run, leaf: dict[str, Any]) -> RowsInFile | None:
        """Where the rows of a run lie, until ``close``; None if they have to be decoded."""
        path, tensor = self._proved(run)
        as_stored = run.format in FLOAT_DTYPES or run.format.startswith("raw:")
        if run.layout != "HND" or not as_stored:
            return None
        if path not in self._files:
            self._files[path] = _File(path, self._sizes[path])
        found = self._files[path].rows(tensor["name"], int(tensor["row"]))
        if found is not None and (
            found.heads != int(leaf["heads"]) or found.padded_rows - found.first < run.rows
        ):
            raise StoreUnavailable(f"leaf {run.layer} {run.side}: a tensor of another shape")
        return found

    def close(self) -> None:
        """Closes the files that ``in_file`` has opened."""
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _proved(self, run: Run) -> tuple[str, dict[str, Any]]:
        place = (run.layer, run.side, run.start, run.start + run.rows)
        if place not in self._tensors:
            raise missing(f"leaf {run.layer} {run.side}: the run from token {run.start} on")
        path, tensor = self._tensors[place]
        stored = (tensor["format"], tensor["layout"], tensor["crc32c"])
        if stored != (run.format, run.layout, run.crc):
            raise DamagedData(f"leaf {run.layer} {run.side}: rows of another store lie there")
        return path, tensor

    def _open(self, path: str) -> dict[str, mx.array]:
        if path not in self._arrays:
            size = os.stat(path).st_size
            if size != self._sizes[path]:
                raise StoreUnavailable(f"{path} has {size} bytes instead of {self._sizes[path]}")
            self._arrays[path] = tensors_of(path)
        return self._arrays[path]
