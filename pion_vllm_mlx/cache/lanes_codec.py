"""Rows between MLX arrays and the bytes of a storage format.

Float formats keep their bits and stay in MLX; a quantized format goes through its
codec, head-major where the format can be cut at heads, else token-major.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.completion import Run
from pion_vllm_mlx.cache.leaf import LeafRows, LeafSpec, Side, as_stored_bytes, dtype_name
from pion_vllm_mlx.errors import CommandError, DamagedData
from pion_vllm_mlx.formats import get_format, resolve

FLOAT_DTYPES = {"bf16": mx.bfloat16, "fp16": mx.float16, "fp32": mx.float32}


def stored_as(leaf: LeafSpec, vquant: str | None) -> LeafSpec:
    """The leaf in the storage format that was asked for; opaque leaves stay as they are."""
    if vquant is None or leaf.format not in FLOAT_DTYPES:
        return leaf
    kinds = {resolve(vquant, width).name for width in (leaf.k_width, leaf.v_width) if width}
    # A leaf has one format: a width that the blocks do not fit decides for both sides.
    return replace(leaf, format=kinds.pop() if len(kinds) == 1 else "int8")


def layout_of(leaf: LeafSpec, side: Side) -> str:
    """``HND`` where the format can be cut at heads, else ``NHD`` (token-major)."""
    kind = get_format(leaf.format_of(side))
    head_major = not leaf.token_major and kind.head_major(leaf.width(side), leaf.heads)
    return "HND" if head_major else "NHD"


def run_bytes(leaf: dict[str, Any], run: Run) -> int:
    """How many bytes the rows of a run have, from the leaf's JSON."""
    return run.rows * get_format(run.format).row_bytes(int(leaf[run.side]))


def encode_rows(rows: LeafRows, leaf: LeafSpec) -> Any:
    """The bytes of ``rows`` in the leaf's format and layout. Evaluates."""
    name, array = leaf.format_of(rows.side), rows.array
    if name.startswith("raw:"):
        return as_stored_bytes(array)
    row_values = array.shape[3]
    if layout_of(leaf, rows.side) == "NHD":
        array, row_values = array.transpose(0, 2, 1, 3), leaf.width(rows.side)
    dtype = FLOAT_DTYPES.get(name)
    if dtype is not None:
        return as_stored_bytes(array if array.dtype == dtype else _converted(array, dtype))
    table = np.array(mx.contiguous(array.astype(mx.float32))).reshape(-1, row_values)
    return get_format(name).encode(table).reshape(-1)


def _converted(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Raises CommandError where a number becomes infinite."""
    values = array.astype(dtype)
    if mx.any(mx.isinf(values) & ~mx.isinf(array)).item():
        raise CommandError(f"rows hold a value beyond the range of {dtype_name(dtype)}")
    return values


def decode_rows(blob: NDArray[np.uint8], run: Run, leaf: dict[str, Any]) -> mx.array:
    """``[H, rows, D]`` of a run's bytes: the stored dtype, float32 of a quantized format,
    bytes of an opaque one. Raises DamagedData for another number of bytes.
    """
    heads, width = int(leaf["heads"]), int(leaf[run.side])
    if blob.nbytes != run_bytes(leaf, run):
        raise DamagedData(f"leaf {run.layer} {run.side}: {blob.nbytes} bytes, another number")
    dtype = FLOAT_DTYPES.get(run.format)
    if dtype is not None:
        words = mx.array(blob.view(np.uint32 if dtype == mx.float32 else np.uint16))
        return _head_major(words.view(dtype), run, heads)
    if run.format.startswith("raw:"):
        return _head_major(mx.array(blob), run, heads)
    dim = width // heads if run.layout == "HND" else width
    row_bytes = get_format(run.format).row_bytes(dim)
    values = get_format(run.format).decode(blob.reshape(-1, row_bytes))
    return _head_major(mx.array(values).reshape(-1), run, heads)


def _head_major(flat: mx.array, run: Run, heads: int) -> mx.array:
    if run.layout == "HND":
        return flat.reshape(heads, run.rows, -1)
    return flat.reshape(run.rows, heads, -1).transpose(1, 0, 2)


def decode_tensors(tensors: list[mx.array], run: Run, heads: int) -> mx.array:
    """``[H, n_pad, D]`` of the tensors of a run in a file; spare rows stay where they can.

    ``tensors`` are ``[H, n_pad, D]`` or ``[n, W]``; three of them for mlx4g32.
    """
    head_major = run.layout == "HND"
    if len(tensors) == 3:
        codes, scales, biases = tensors
        values = mx.dequantize(
            codes, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=4
        )
    elif run.format in FLOAT_DTYPES or run.format.startswith("raw:"):
        (values,) = tensors
    else:
        table = np.array(tensors[0])
        values = mx.array(get_format(run.format).decode(table.reshape(table.shape[0], -1)))
    if head_major:
        return values
    return values.reshape(values.shape[0], heads, -1).transpose(1, 0, 2)
