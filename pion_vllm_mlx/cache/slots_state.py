"""Recurrent state as one safetensors byte string (arrays ``a0``, ``a1``, …).

The metadata key ``meta`` is ``type=<class>|narr=<n>``; an entry that is None is
simply absent. Read with checks of every length: a blob that does not fit its
own header is DamagedData, never an array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pion_vllm_mlx.errors import DamagedData

StateArrays = list["mx.array | None"]

_NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32", mx.complex64: "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def storable_dtype(dtype: mx.Dtype) -> bool:
    """Whether a state array of this dtype can be written."""
    return dtype in _NAMES


@dataclass(frozen=True)
class StatePart:
    """One array of a recurrent slot as bytes; ``dtype`` is safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def encode_state(class_name: str, arrays: Sequence[mx.array | None]) -> bytes:
    """The byte string of one recurrent slot. Evaluates the arrays."""
    parts = [
        None
        if array is None
        else StatePart(state_dtype(array.dtype), tuple(array.shape), _bytes_of(array))
        for array in arrays
    ]
    return encode_parts(class_name, parts)


def state_dtype(dtype: mx.Dtype) -> str:
    """The name of a dtype in such a byte string. Raises KeyError for one that cannot be in it."""
    return _NAMES[dtype]


def encode_parts(class_name: str, parts: Sequence[StatePart | None]) -> bytes:
    """The byte string of one recurrent slot whose arrays are bytes already. Needs no MLX."""
    header: dict[str, Any] = {"__metadata__": {"meta": f"type={class_name}|narr={len(parts)}"}}
    chunks: list[memoryview] = []
    end = 0
    for index, part in enumerate(parts):
        if part is None:
            continue
        begin, end = end, end + part.data.nbytes
        header[f"a{index}"] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [begin, end],
        }
        chunks.append(part.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *chunks])


def decode_state(blob: bytes | bytearray | memoryview) -> StateArrays:
    """The arrays of one recurrent slot, None where an entry was absent.

    Raises DamagedData for anything that ``encode_state`` would not write.
    """
    view = memoryview(blob).cast("B")
    try:
        (length,) = struct.unpack_from("<Q", view, 0)
        if length > len(view) - 8:
            raise DamagedData("recurrent state: header longer than the blob")
        header = json.loads(bytes(view[8 : 8 + length]))
        count = int(header["__metadata__"]["meta"].rpartition("narr=")[2])
        body = view[8 + length :]
        if not 0 <= count <= 4096:
            raise DamagedData("recurrent state: impossible number of arrays")
        return [_array(header.get(f"a{i}"), body) for i in range(count)]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedData(f"recurrent state: {error}") from error


def _array(entry: dict[str, Any] | None, body: memoryview) -> mx.array | None:
    if entry is None:
        return None
    dtype = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    shape = [int(size) for size in entry["shape"]]
    wanted = dtype.size
    for size in shape:
        wanted *= size
    if not 0 <= begin <= end <= len(body) or end - begin != wanted:
        raise DamagedData("recurrent state: an array lies outside the blob")
    if wanted == 0:
        return mx.zeros(shape, dtype)
    raw = mx.array(np.frombuffer(body[begin:end], np.uint8))
    if dtype == mx.bool_:
        return raw.astype(mx.bool_).reshape(shape)
    return raw.view(dtype).reshape(shape)


def _bytes_of(array: mx.array) -> memoryview:
    if array.size == 0:
        return memoryview(b"")
    flat = mx.contiguous(array).reshape(-1)
    if flat.dtype == mx.bool_:
        flat = flat.astype(mx.uint8)
    raw = flat if flat.dtype == mx.uint8 else flat.view(mx.uint8)
    mx.eval(raw)
    return memoryview(raw).cast("B")  # type: ignore[arg-type]  # mlx's stubs omit the buffer protocol
