"""A 128-bit universal hash over the full content of arrays.

Each array is read as little-endian uint32 words ``w``. For every block of 16,384
words and each of two fixed sequences ``k`` of pseudo-random 64-bit keys, the block
gives ``sum(w[i] * k[i]) mod 2**64``: two arrays that differ in a block agree in both
sums with a probability of 2**-66 at the most, whatever the difference (sign flips
and swapped rows included, which sums without keys or with 32 bits would miss). The
sums of all blocks, in order, go into BLAKE2b together with shape and dtype.

The arithmetic is exact integer arithmetic, so NumPy (on a CPU, where it is several
times faster) and MLX (on a GPU, where the weights are) give the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.leaf import dtype_name

BLOCK_WORDS = 1 << 14
_BATCH_BLOCKS = 1 << 9  # 32 MB of weights at a time: bounds the temporary memory

Words = NDArray[np.uint32]
Sums = NDArray[np.uint64]


def array_digest(array: mx.array) -> bytes:
    """The 16-byte digest of one array: content, shape and dtype. Evaluates it."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dtype_name(array.dtype)} {list(array.shape)}".encode())
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    for sums in _mlx_sums(array) if on_gpu else _numpy_sums(array):
        digest.update(sums.tobytes())
    return digest.digest()


@lru_cache(maxsize=1)
def keys() -> NDArray[np.uint64]:
    """The two key sequences ``[2, BLOCK_WORDS]``: BLAKE2b in counter mode."""
    count = 2 * BLOCK_WORDS * 8 // 64
    stream = b"".join(
        hashlib.blake2b(index.to_bytes(8, "little"), person=b"pion weights").digest()
        for index in range(count)
    )
    return np.frombuffer(stream, "<u8").reshape(2, BLOCK_WORDS)


@lru_cache(maxsize=1)
def _mlx_keys() -> mx.array:
    return mx.array(keys())


def _numpy_sums(array: mx.array) -> Iterator[Sums]:
    words = _numpy_words(array)
    first, second = keys()
    wide, product = np.empty(BLOCK_WORDS, np.uint64), np.empty(BLOCK_WORDS, np.uint64)
    sums: list[np.uint64] = []
    for start in range(0, words.size, BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        size = block.size
        np.copyto(wide[:size], block)
        for key in (first, second):
            np.multiply(wide[:size], key[:size], out=product[:size])
            sums.append(product[:size].sum(dtype=np.uint64))
    yield np.array(sums, "<u8")


def _numpy_words(array: mx.array) -> Words:
    """The words of an array, shared with it where its size allows."""
    flat = _as_unsigned(array)
    mx.eval(flat)
    raw = np.asarray(flat).view(np.uint8)
    missing = -raw.size % 4
    if missing:
        raw = np.concatenate([raw, np.zeros(missing, np.uint8)])
    return raw.view("<u4")


def _mlx_sums(array: mx.array) -> Iterator[Sums]:
    flat = _as_unsigned(array)
    missing = -(flat.size * flat.itemsize) % 4
    if missing:
        flat = mx.concatenate([flat, mx.zeros(missing // flat.itemsize, flat.dtype)])
    words = flat if flat.dtype == mx.uint32 else flat.view(mx.uint32)
    whole = words.size // BLOCK_WORDS * BLOCK_WORDS
    step = _BATCH_BLOCKS * BLOCK_WORDS
    for start in range(0, whole, step):
        part = words[start : min(start + step, whole)].reshape(-1, BLOCK_WORDS)
        yield _mlx_blocks(part, BLOCK_WORDS)
    if words.size > whole:
        yield _mlx_blocks(words[whole:][None], words.size - whole)


def _mlx_blocks(words: mx.array, size: int) -> Sums:
    """The sums ``[blocks, 2]`` of ``words`` ``[blocks, size]``."""
    wide = words.astype(mx.uint64)
    sums = mx.stack([(wide * key[:size]).sum(axis=1) for key in _mlx_keys()], axis=1)
    mx.eval(sums)
    return np.array(sums).astype("<u8")


def _as_unsigned(array: mx.array) -> mx.array:
    """The flat array as unsigned integers of its item size (8 bytes as two words)."""
    flat = array.reshape(-1)
    if flat.dtype == mx.bool_:
        return flat.astype(mx.uint8)
    wanted = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint32}[flat.itemsize]
    return flat if flat.dtype == wanted else flat.view(wanted)
