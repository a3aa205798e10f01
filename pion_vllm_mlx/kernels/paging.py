"""Prefixes that begin alike, laid out over one pool of blocks: what is equal is there once.

Letters: H KV heads, N tokens, X whatever follows them. A side is one array, or codes, scales and
biases; all of them are cut at the same tokens, so a block is 64 tokens of K and of V together.
Blocks are one where their bytes are and where they stand at the same place of their prefix: K and
V depend on all tokens before. Everything here is numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.prefix import Affine, Prefix, Side, arrays_of

BLOCK_TOKENS = 64
"""Tokens of a block; blocks of a lineage's index are as long."""

Arrays: TypeAlias = "list[NDArray[Any]]"


@dataclass(frozen=True)
class Pooled:
    """Prefixes over one pool: ``prefixes`` in the order in which they were given.

    One without a table shares nothing, and lies by itself. The pool has ``num_blocks`` of
    ``block_bytes`` each, every one in a table; none where nothing is shared.
    """

    prefixes: list[Prefix]
    num_blocks: int = 0
    block_bytes: int = 0


@dataclass(frozen=True)
class _Paged:
    """A prefix in blocks: arrays ``[>= n, H, 64, X]``, and where its blocks lie in them."""

    arrays: Arrays
    table: NDArray[np.int32]

    def bytes_of(self, block: int) -> list[NDArray[np.uint64]]:
        """A block of each array, as words; 64 rows are always whole ones."""
        return [array[block].reshape(-1).view(np.uint64) for array in self.arrays]


class _Unique:
    """The blocks that differ, numbered in the order of coming."""

    def __init__(self) -> None:
        self.found: list[tuple[_Paged, int]] = []
        self._known: dict[tuple[int, int, int], int] = {}
        self._alike: dict[tuple[int, int], list[int]] = {}

    def number(self, at: int, source: _Paged, block: int) -> int:
        """The number of a block that stands at place ``at``."""
        # one of a pool is known by its place there: it is compared once, not for each sharer
        key = at, id(source.arrays[0]), block
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._compared(at, source, block)
        return number

    def _compared(self, at: int, source: _Paged, block: int) -> int:
        mine, checksum = source.bytes_of(block), 0
        for words in mine:
            checksum = crc32c(words.view(np.uint8).data, checksum)
        candidates = self._alike.setdefault((at, checksum), [])
        for number in candidates:
            other, there = self.found[number]
            pairs = zip(mine, other.bytes_of(there), strict=True)
            if all(np.array_equal(one, two) for one, two in pairs):
                return number
        self.found.append((source, block))
        candidates.append(len(self.found) - 1)
        return candidates[-1]


def first_block(prefix: Prefix) -> bytes:
    """What prefixes have in common that may share blocks: their shape, types, and first block.

    Empty for one without a whole block.
    """
    if prefix.num_tokens < BLOCK_TOKENS:
        return b""
    arrays = _arrays(prefix)
    checksum = 0
    for array in arrays:
        rows = array[:, :BLOCK_TOKENS] if prefix.table is None else array[prefix.table[0]]
        checksum = crc32c(np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data, checksum)
    kinds = [(array.dtype.str, array.shape[-1]) for array in arrays]
    return repr((prefix.num_kv_heads, prefix.head_dim, kinds, checksum)).encode()


def pooled(prefixes: Sequence[Prefix]) -> Pooled:
    """The same prefixes, of one shape and type, with equal blocks once. Copies what is shared.

    Where one had statistics it keeps them.
    """
    paged = [_in_blocks(one) for one in prefixes]
    unique = _Unique()
    numbers = [
        np.array([unique.number(at, one, block) for at, block in enumerate(one.table.tolist())])
        for one in paged
    ]
    uses = np.bincount(np.concatenate(numbers), minlength=len(unique.found))
    shares = [bool((uses[own] > 1).any()) for own in numbers]
    in_pool = [own for own, is_so in zip(numbers, shares, strict=True) if is_so]
    if not in_pool:
        return Pooled([_contiguous(one) for one in prefixes])
    wanted = np.unique(np.concatenate(in_pool))
    pool = _gathered([unique.found[number] for number in wanted.tolist()])
    place = np.zeros(len(unique.found), np.int32)
    place[wanted] = np.arange(len(wanted), dtype=np.int32)
    found = [
        _over(one, pool, place[own]) if is_so else _contiguous(one)
        for one, own, is_so in zip(prefixes, numbers, shares, strict=True)
    ]
    return Pooled(found, len(wanted), sum(array[0].nbytes for array in pool))


def _arrays(prefix: Prefix) -> Arrays:
    return [*arrays_of(prefix.keys), *arrays_of(prefix.values)]


def _with_arrays(prefix: Prefix, arrays: Arrays, table: NDArray[np.int32] | None) -> Prefix:
    """The prefix over other arrays; what it remembers stays true."""
    half = len(arrays) // 2

    def side(like: Side, given: Arrays) -> Side:
        if not isinstance(like, Affine):
            return given[0]
        codes, scales, biases = given
        return Affine(codes, scales, biases, like.bits, like.group)

    keys, values = side(prefix.keys, arrays[:half]), side(prefix.values, arrays[half:])
    return Prefix(keys, values, prefix.num_tokens, table, prefix.statistics)


def _in_blocks(prefix: Prefix) -> _Paged:
    """The prefix cut into blocks, zeros behind its last token; as it is where it is paged."""
    if prefix.table is not None:
        used = -(-prefix.num_tokens // BLOCK_TOKENS)
        return _Paged(_arrays(prefix), prefix.table[:used])
    num_tokens = prefix.num_tokens
    full, rest = divmod(num_tokens, BLOCK_TOKENS)
    found = []
    for array in _arrays(prefix):
        heads, _, width = array.shape
        blocks = np.zeros((full + bool(rest), heads, BLOCK_TOKENS, width), array.dtype)
        whole = array[:, : full * BLOCK_TOKENS].reshape(heads, full, BLOCK_TOKENS, width)
        blocks[:full] = whole.swapaxes(0, 1)
        if rest:
            blocks[full, :, :rest] = array[:, full * BLOCK_TOKENS : num_tokens]
        found.append(blocks)
    return _Paged(found, np.arange(len(found[0]), dtype=np.int32))


def _gathered(blocks: Sequence[tuple[_Paged, int]]) -> Arrays:
    """Copies of blocks, one behind the other in each head: so a processor reads them in one go."""
    first = blocks[0][0].arrays
    shapes = [(array.shape[1], len(blocks), *array.shape[2:]) for array in first]
    pool = [
        np.empty(shape, array.dtype).swapaxes(0, 1)
        for shape, array in zip(shapes, first, strict=True)
    ]
    for at, (source, block) in enumerate(blocks):
        for out, array in zip(pool, source.arrays, strict=True):
            out[at] = array[block]
    return pool


def _over(prefix: Prefix, pool: Arrays, table: NDArray[np.int32]) -> Prefix:
    return _with_arrays(prefix, pool, np.ascontiguousarray(table, np.int32))


def _contiguous(prefix: Prefix) -> Prefix:
    """The prefix by itself, without a table: the same object where it has none."""
    if prefix.table is None:
        return prefix
    found = []
    for array in _arrays(prefix):
        _, heads, _, width = array.shape
        rows = array[prefix.table].swapaxes(0, 1).reshape(heads, -1, width)
        found.append(np.ascontiguousarray(rows[:, : prefix.num_tokens]))
    return _with_arrays(prefix, found, None)
