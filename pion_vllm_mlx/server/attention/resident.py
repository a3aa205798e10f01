"""The K/V of one layer as they stay in memory.

Letters: H KV heads, N tokens of the prefix, D head dimension. What arrives as float32 is
kept as ``fp32`` (the received bytes themselves), ``fp16`` or ``bf16``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.prefix import HEAD_DIMS, MAX_KV_HEADS
from pion_vllm_mlx.server.attention.shared_blocks import Share

Floats = NDArray[np.float32]
#: shapes of queries of which it is remembered how they are computed.
_KEPT_SHAPES = 8
Blob = bytes | memoryview

#: how K/V may be kept; "stored": rows of the V-store in their own format where kernels read it.
DTYPES = ("fp32", "fp16", "bf16", "stored")


@dataclass(frozen=True)
class Resident:
    """K/V rows ``[absent, tokens)`` of a layer; those before were never stored.

    ``family``: equal for K/V that may share blocks, ``share`` the blocks where they do.
    """

    prefix: api.Prefix
    absent: int = 0
    family: bytes = b""
    share: Share | None = None
    _repeated: dict[tuple[int, bytes, int], api.Repeated | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def heads(self) -> int:
        return self.prefix.num_kv_heads

    @property
    def tokens(self) -> int:
        """N, the rows that are absent included."""
        return self.absent + self.prefix.num_tokens

    @property
    def dim(self) -> int:
        return self.prefix.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and the block statistics that queries asked for."""
        return self.prefix.rows_bytes + self.prefix.statistics_bytes

    def repeated(
        self, heads: int, head_map: NDArray[np.uint8] | None, window: int
    ) -> api.Repeated | None:
        """What answers queries of one float32 token of so many heads; see ``api.repeated``."""
        if not self.prefix.is_host:
            return None
        key = heads, b"" if head_map is None else head_map.tobytes(), window
        if key not in self._repeated:
            if len(self._repeated) >= _KEPT_SHAPES:
                self._repeated.clear()
            q = np.zeros((heads, 1, self.dim), np.float32)
            self._repeated[key] = api.repeated(q, self.prefix, head_map, window)
        return self._repeated[key]

    def shrink(self, most_bytes: int) -> None:
        """Give up block statistics until so many bytes are left, or K and V alone."""
        self.prefix.forget(most_bytes - self.prefix.rows_bytes)

    def window(self, asked: int) -> int:
        """The window over the rows that are there, 0 for all of them.

        ``asked``: the last so many tokens of the prefix, 0 for all. Raises CommandError where
        rows would be seen that are absent.
        """
        there = self.prefix.num_tokens
        if 0 < asked < there:
            return asked
        if self.absent and not 0 < asked <= there:
            raise CommandError(
                f"ATTEND.PREFIX: the first {self.absent} of {self.tokens} tokens are not stored, "
                f"fa_window must be 1 to {there}"
            )
        return 0


@dataclass(frozen=True)
class Shape:
    """H, N and D of K/V that arrive."""

    heads: int
    tokens: int
    dim: int

    def __post_init__(self) -> None:
        check_dim(self.dim)
        if self.heads > MAX_KV_HEADS:
            raise CommandError(f"ATTEND.PREFIX: at most {MAX_KV_HEADS} KV heads, not {self.heads}")

    @property
    def side_bytes(self) -> int:
        """Bytes of K or V as they travel."""
        return 4 * self.heads * self.tokens * self.dim

    def floats(self, blob: Blob) -> Floats:
        """``[H, N, D]`` where the bytes lie."""
        return np.frombuffer(blob, "<f4").reshape(self.heads, self.tokens, self.dim)


def check_dim(dim: int) -> None:
    """Raise CommandError for a head dimension without kernels."""
    if dim not in HEAD_DIMS:
        raise CommandError(f"unsupported head dim D={dim}")


def resident_bytes(shape: Shape, dtype: str) -> int:
    """Bytes that K and V of a shape take once they are kept."""
    sides = 2 * shape.side_bytes
    return sides // 2 if dtype in ("fp16", "bf16") else sides


def from_floats(keys: Floats, values: Floats, dtype: str, absent: int = 0) -> Resident:
    """K/V ``[H, N, D]`` as they stay; the arrays themselves where nothing is to convert. Slow."""
    kept = "fp32" if dtype == "stored" else dtype
    return Resident(api.dense_prefix(keys, values, kept), absent)
