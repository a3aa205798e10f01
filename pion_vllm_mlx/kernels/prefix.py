"""The K and V rows that queries attend to, in memory: arrays, quantized groups, block tables.

H_kv KV heads, N tokens, D head dimension.  Arrays are numpy's or mlx's; those of one object are of
one kind.  numpy knows no bfloat16: there a bf16 array is its bit patterns, ``uint16``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError

Array: TypeAlias = Any
"""A numpy or mlx array; the docstring at hand says its shape and types."""

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256, 512)
MAX_HEADS = 1024  # of Q; KV heads are numbered by a byte
MAX_KV_HEADS = 256

# Statistics of a prefix that are kept: one window and block size in use, and one to change to.
_KEPT_STATISTICS = 4

# Of numpy and of mlx; uint16 is numpy's bf16.
_HOST_VALUES = {np.dtype(name).num for name in ("float32", "float16", "uint16")}
_MLX_VALUES = {"mlx.core.float32", "mlx.core.float16", "mlx.core.bfloat16"}
_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Affine:
    """Groups of integers with a scale and a bias each, as ``mx.quantize`` lays them out.

    ``codes`` u32 ``[..., D * bits / 32]``: value j of a word has its bits ``bits * j`` and up;
    ``scales``, ``biases`` f16, bf16 or f32 ``[..., D / group]``; value = code * scale + bias.
    ``bits`` is 4 or 8, ``group`` 32, 64 or 128 and divides D.  mlx4g32 is bits 4, group 32.
    """

    codes: Array
    scales: Array
    biases: Array
    bits: int = 4
    group: int = 32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, ``[..., D]``."""
        *outer, words = self.codes.shape
        return (*outer, words * 32 // self.bits)

    def mapped(self, pick: Callable[[Array], Array]) -> Affine:
        """The groups that ``pick`` makes of codes, scales and biases alike."""
        arrays = pick(self.codes), pick(self.scales), pick(self.biases)
        return Affine(*arrays, self.bits, self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases."""
        return int(self.codes.nbytes + self.scales.nbytes + self.biases.nbytes)


Side: TypeAlias = Any
"""One side of a prefix, K or V: an array of f32, f16 or bf16 values, or an ``Affine``."""


@dataclass(frozen=True)
class BlockStatistics:
    """What a selector keeps of full blocks: f32 ``[H_kv, n_blocks, D]``.

    Of ``mean``: ``high`` is the mean, ``low`` None.  Of ``quest``: the largest and least values.
    """

    high: Array
    low: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.high.nbytes + (0 if self.low is None else self.low.nbytes))


@dataclass(frozen=True)
class Prefix:
    """The K and V rows of one layer; immutable, and so are its arrays.

    Without ``table``: ``keys`` and ``values`` ``[H_kv, >= N, D]``, of which the first
    ``num_tokens`` (N) count.  With a block table (paged): ``[pool, H_kv, page, D]``, and token t is
    row ``t % page`` of block ``table[t // page]``; ``table`` is i32 on the host, of at least
    ceil(N / page) entries, each below the pool's size.  Both sides are alike in shape and type.

    ``statistics`` remembers block statistics of the sparse selectors, in all at most as many bytes
    as K and V take; it is no part of the value.
    Raises CommandError where sides, N and block table do not fit together.
    """

    keys: Side
    values: Side
    num_tokens: int
    table: NDArray[np.int32] | None = None
    statistics: dict[tuple[str, int, int], BlockStatistics] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        _check_prefix(self)

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return int(self.keys.shape[0 if self.table is None else 1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.keys.shape[-1])

    @property
    def page_tokens(self) -> int:
        """Tokens of a block of a paged prefix; N of any other."""
        return self.num_tokens if self.table is None else int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as they are held; of the whole pool, where there is one."""
        return int(self.keys.nbytes + self.values.nbytes)

    @property
    def rows_bytes(self) -> int:
        """Bytes of its own rows: of a pool those of the blocks in its table."""
        if self.table is None:
            return self.nbytes
        return self.nbytes // int(self.keys.shape[0]) * -(-self.num_tokens // self.page_tokens)

    @property
    def is_host(self) -> bool:
        """Whether the arrays are numpy's."""
        return isinstance(_some_array(self.keys), np.ndarray)

    @property
    def statistics_bytes(self) -> int:
        """Bytes of the statistics that are remembered."""
        return sum(one.nbytes for one in list(self.statistics.values()))

    def remember(self, key: tuple[str, int, int], found: BlockStatistics) -> None:
        """Keep statistics under (selector, block tokens, first token); old ones may go.

        Those of tiny blocks may be larger than the rows, and are not kept.
        """
        if found.nbytes > self.rows_bytes:
            return
        for oldest in list(self.statistics):  # another thread may forget some meanwhile
            room = self.rows_bytes - self.statistics_bytes
            if len(self.statistics) < _KEPT_STATISTICS and found.nbytes <= room:
                break
            self.statistics.pop(oldest, None)
        self.statistics[key] = found

    def forget(self, most_bytes: int) -> None:
        """Keep of the statistics the latest that take ``most_bytes`` together."""
        left = most_bytes
        for key, found in reversed(list(self.statistics.items())):
            if found.nbytes <= left:
                left -= found.nbytes
            else:
                self.statistics.pop(key, None)


def arrays_of(side: Side) -> list[Array]:
    """The arrays that a side is made of: its values, or codes, scales and biases."""
    return [side.codes, side.scales, side.biases] if isinstance(side, Affine) else [side]


def _some_array(side: Side) -> Array:
    return arrays_of(side)[0]


@dataclass(frozen=True)
class Suffix:
    """K and V ``[H_kv, S, D]`` of tokens behind the prefix; S may be 0."""

    keys: Array
    values: Array

    @property
    def num_tokens(self) -> int:
        """S."""
        return int(self.keys.shape[1])


def is_value_array(array: Any) -> bool:
    """Whether it is an array of f32, f16 or bf16."""
    if isinstance(array, np.ndarray):
        # numpy takes ten microseconds to spell a type, and some to compare one
        return array.dtype.num in _HOST_VALUES
    return str(array.dtype) in _MLX_VALUES


def check_values(what: str, array: Any) -> None:
    """Raise CommandError unless ``array`` holds f32, f16 or bf16."""
    if not is_value_array(array):
        raise CommandError(f"{what} must be float32, float16 or bfloat16, not {array.dtype}")


def _check_prefix(prefix: Prefix) -> None:
    keys, values = prefix.keys, prefix.values
    if type(_some_array(keys)) is not type(_some_array(values)):
        raise CommandError("K and V must be arrays of one kind, of numpy or of mlx")
    if isinstance(keys, Affine) != isinstance(values, Affine) or keys.shape != values.shape:
        raise CommandError(
            f"shape mismatch: K {shape_text(keys.shape)}, V {shape_text(values.shape)}"
        )
    num_axes = 3 if prefix.table is None else 4
    if len(keys.shape) != num_axes:
        raise CommandError(f"shape mismatch: K has {len(keys.shape)} axes, expected {num_axes}")
    for what, side in (("K", keys), ("V", values)):
        _check_side(what, side)
    if prefix.head_dim not in HEAD_DIMS:
        raise CommandError(f"unsupported head dim D={prefix.head_dim}")
    if not 1 <= prefix.num_kv_heads <= MAX_KV_HEADS:
        raise CommandError(f"H_kv must be 1 to {MAX_KV_HEADS}, not {prefix.num_kv_heads}")
    if prefix.num_tokens < 1:
        raise CommandError("a prefix has at least one token")
    if prefix.table is None:
        if prefix.num_tokens > keys.shape[1]:
            raise CommandError(f"shape mismatch: N={prefix.num_tokens}, rows {keys.shape[1]}")
    else:
        _check_table(prefix, prefix.table)


def _check_side(what: str, side: Side) -> None:
    if not isinstance(side, Affine):
        check_values(what, side)
        return
    if side.bits not in (4, 8) or side.group not in _GROUPS or side.shape[-1] % side.group:
        raise CommandError(
            f"{what}: groups of {side.group} with {side.bits} bits are not supported"
        )
    if not str(side.codes.dtype).endswith("uint32"):
        raise CommandError(f"{what}: codes must be uint32, not {side.codes.dtype}")
    expected = (*side.shape[:-1], side.shape[-1] // side.group)
    for name, array in (("scales", side.scales), ("biases", side.biases)):
        check_values(f"{what}: {name}", array)
        if tuple(array.shape) != expected:
            given, wanted = shape_text(array.shape), shape_text(expected)
            raise CommandError(f"shape mismatch: {what}: {name} {given}, not {wanted}")


def _check_table(prefix: Prefix, table: NDArray[np.int32]) -> None:
    pool, _, page, _ = prefix.keys.shape
    if table.dtype != np.int32:
        raise CommandError(f"block table: entries must be int32, not {table.dtype}")
    if table.ndim != 1 or page < 1 or len(table) * page < prefix.num_tokens:
        raise CommandError(f"block table: {len(table)} blocks do not hold N={prefix.num_tokens}")
    used = table[: -(-prefix.num_tokens // page)]
    if used.min() < 0 or used.max() >= pool:
        raise CommandError(f"block table: an entry is outside the pool of {pool} blocks")


def shape_text(shape: Iterable[int]) -> str:
    """The shape for an error, ``2x300x128``."""
    return "x".join(str(size) for size in shape)
