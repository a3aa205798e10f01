"""What the storage formats do, in plain numpy: the reference the server is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
FORMATS = ("fp16", "bf16", "fp32", "int8", "mlx4g32")


def _bf16(rows: Rows) -> NDArray[np.uint16]:
    bits = rows.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored(fmt: str, rows: Rows) -> NDArray[np.uint8]:
    """The wire rows ``[n, row_bytes]`` of finite float32 rows ``[n, W]``."""
    n, width = rows.shape
    if fmt == "fp16":
        return rows.astype("<f2").view(np.uint8)
    if fmt == "bf16":
        return _bf16(rows).view(np.uint8)
    if fmt == "fp32":
        return rows.view(np.uint8)
    if fmt == "int8":
        low, high = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
        codes = np.rint((rows - low) / (high - low) * np.float32(255)).astype(np.uint8)
        return np.concatenate((low.view(np.uint8), high.view(np.uint8), codes), axis=1)
    grouped = rows.reshape(n, width // 32, 32)
    low, high = grouped.min(2, keepdims=True), grouped.max(2, keepdims=True)
    scale = ((high - low) / np.float32(15)).astype("<f2")
    bias = low.astype("<f2")
    codes = np.clip(np.rint((grouped - bias.astype("f4")) / scale.astype("f4")), 0, 15)
    nibbles = codes.astype(np.uint32).reshape(n, width // 8, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32)
    columns = (words, scale[..., 0], bias[..., 0])
    return np.concatenate([np.ascontiguousarray(c).view(np.uint8) for c in columns], axis=1)


def floats(fmt: str, wire: NDArray[np.uint8], width: int) -> Rows:
    """The float32 values of wire rows."""
    wire = np.ascontiguousarray(wire)
    n = len(wire)
    if fmt == "fp16":
        return wire.view("<f2").astype(np.float32)
    if fmt == "bf16":
        return (wire.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if fmt == "fp32":
        return wire.view("<f4")
    if fmt == "int8":
        low, high = (np.ascontiguousarray(wire[:, a : a + 4]).view("<f4") for a in (0, 4))
        t = wire[:, 8:].astype(np.float32) / np.float32(255)
        return low * (np.float32(1) - t) + high * t
    half, groups = width // 2, width // 32
    words = np.ascontiguousarray(wire[:, :half]).view("<u4")
    scale = np.ascontiguousarray(wire[:, half : half + 2 * groups]).view("<f2").astype("f4")
    bias = np.ascontiguousarray(wire[:, half + 2 * groups :]).view("<f2").astype("f4")
    codes = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    values = codes.reshape(n, groups, 32).astype(np.float32) * scale[..., None] + bias[..., None]
    return values.reshape(n, width).astype(np.float32)


def head_major(fmt: str, wire: NDArray[np.uint8], width: int, heads: int) -> NDArray[np.uint8]:
    """Wire rows ``[n, row_bytes]`` as the run travels head-major: ``[H, n, bytes]``."""
    n = len(wire)
    if fmt != "mlx4g32":
        return np.ascontiguousarray(wire.reshape(n, heads, -1).transpose(1, 0, 2))
    half, groups = width // 2, width // 32
    parts = (wire[:, :half], wire[:, half : half + 2 * groups], wire[:, half + 2 * groups :])
    cut = [part.reshape(n, heads, -1).transpose(1, 0, 2) for part in parts]
    return np.ascontiguousarray(np.concatenate(cut, axis=2))
