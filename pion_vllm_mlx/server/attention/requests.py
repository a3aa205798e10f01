"""What an ATTEND.PREFIX query asks for: checked against its slot, and computed.

Letters: H query heads, H_kv KV heads, N prefix tokens, M query tokens, S suffix tokens,
D head dimension. Both lanes build the same objects, so their replies are the same bytes.
Whatever arrives is float32, as is every reply.

A request is built from sizes and blobs (CommandError for blobs of another size), bound to
what is resident (CommandError where H or D differ), and then computed by the engine. Until
then nobody reads a blob: one may be long, and the event loop has others to serve.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.prefix import MAX_HEADS, MAX_KV_HEADS
from pion_vllm_mlx.server.attention.engine import Call, Progress
from pion_vllm_mlx.server.attention.parts import Extent, Span, suffix_of
from pion_vllm_mlx.server.attention.resident import Blob, Floats, Resident, check_dim

#: a query of more tokens gains nothing from company.
_MOST_SHARED_ROWS = 16

Arrays = list[NDArray[Any]]


def raw(array: NDArray[Any]) -> memoryview:
    """The bytes of a reply's array, where it lies."""
    return np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8).data


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """The array in whole words, as kernels want it; inside of a frame it may begin anywhere."""
    return array if array.flags.aligned else array.copy()


def aligned_suffix(suffix: api.Suffix | None) -> api.Suffix | None:
    """The same of a suffix."""
    return suffix and api.Suffix(aligned(suffix.keys), aligned(suffix.values))


@dataclass(frozen=True)
class Sizes:
    """What a query says of itself. ``window``: as ``Resident.window`` takes it."""

    where: str
    heads: int
    kv_heads: int
    dim: int
    window: int

    def __post_init__(self) -> None:
        check_dim(self.dim)
        limits = (("H_q", self.heads, MAX_HEADS), ("H_kv", self.kv_heads, MAX_KV_HEADS))
        for name, heads, most in limits:
            if not 1 <= heads <= most:
                raise CommandError(f"{self.where}: {name} must be 1 to {most}")

    def blob(self, name: str, data: Blob, *shape: int) -> Floats:
        """A blob of that shape, where it lies: maybe not in whole words. Raises CommandError."""
        wanted = 4 * math.prod(shape)
        if len(data) != wanted:
            raise CommandError(f"{self.where}: {name} blob size {len(data)} instead of {wanted}")
        return np.frombuffer(data, "<f4").reshape(shape)

    def queries(self, data: Blob) -> Floats:
        """Q as ``[H, M, D]``, M from its length. Raises CommandError."""
        row = 4 * self.heads * self.dim
        if not data:
            raise CommandError(f"{self.where}: Q blob size 0 holds no query, M must be 1 or more")
        if len(data) % row:
            raise CommandError(
                f"{self.where}: Q blob size {len(data)} instead of a multiple of {row}"
            )
        return self.blob("Q", data, self.heads, len(data) // row, self.dim)

    def suffix(self, tokens: int, keys: Blob, values: Blob) -> api.Suffix | None:
        """K and V of the suffix; None when there is none. Raises CommandError."""
        shape = self.kv_heads, tokens, self.dim
        k, v = self.blob("K_suf", keys, *shape), self.blob("V_suf", values, *shape)
        return api.Suffix(k, v) if tokens else None

    def head_map(self, data: Blob) -> NDArray[np.uint8] | None:
        """The map of query heads to KV heads, None for the identity. Raises CommandError."""
        if not data:
            if self.heads != self.kv_heads:
                raise CommandError(f"{self.where}: head_map is needed where H_q is not H_kv")
            return None
        if len(data) != self.heads:
            raise CommandError(
                f"{self.where}: head_map blob size {len(data)} instead of {self.heads}"
            )
        named = bytes(data)
        if max(named) >= self.kv_heads:
            raise CommandError(f"{self.where}: head_map names head {max(named)} of {self.kv_heads}")
        if self.heads == self.kv_heads and named == bytes(range(self.heads)):
            return None
        return np.frombuffer(named, np.uint8)

    def check(self, resident: Resident) -> int:
        """The window over what is resident. Raises CommandError where H or D differ."""
        if (self.kv_heads, self.dim) != (resident.heads, resident.dim):
            raise CommandError(
                f"ATTEND.PREFIX: shape mismatch, H={resident.heads} D={resident.dim} are stored, "
                f"not H={self.kv_heads} D={self.dim}"
            )
        return resident.window(self.window)


@dataclass(frozen=True)
class Dense:
    """Every query sees the whole windowed prefix, and of a suffix what is not after it.

    ``with_lse``: the log-sum-exp follows the output where M > 1.
    """

    sizes: Sizes
    q: Floats
    head_map: NDArray[np.uint8] | None
    suffix: api.Suffix | None = None
    with_lse: bool = False

    def bound(self, resident: Resident) -> BoundDense | LongDense:
        """With its slot. Raises CommandError where it does not fit."""
        window = self.sizes.check(resident)
        if self.q.shape[1] == 1:  # most are, and there is nothing to cut
            known = resident.repeated(self.q.shape[0], self.head_map, window)
            return BoundDense(self, resident.prefix, window, known)
        bound = BoundDense(self, resident.prefix, window)
        return LongDense(bound) if bound.extent.is_long else bound

    def aligned(self) -> Dense:
        """The same with arrays in whole words."""
        q, suffix = aligned(self.q), aligned_suffix(self.suffix)
        return Dense(self.sizes, q, self.head_map, suffix, self.with_lse)

    def part(self, span: Span) -> Dense:
        """The query of some of its tokens; its suffix None where each of them sees all of it."""
        suffix = self.suffix and suffix_of(self.suffix, self.q.shape[1], span)
        return replace(self, q=self.q[:, slice(*span)], suffix=suffix)

    def suffix_alone(self) -> tuple[Floats, Floats]:
        """Output and log-sum-exp over the suffix, of which one query sees all; nothing: 0, -inf."""
        if self.suffix is None or not self.suffix.num_tokens:
            return np.zeros_like(self.q), np.full(self.q.shape[:2], -np.inf, np.float32)
        own = api.dense_prefix(self.suffix.keys, self.suffix.values)
        found = api.attend(self.q, own, self.head_map)
        return found.out, found.lse

    def reply(self, found: api.Attended) -> Arrays:
        """What is sent of a result."""
        trailer = self.with_lse and self.q.shape[1] > 1
        arrays = [found.out, found.lse] if trailer else [found.out]
        return [np.ascontiguousarray(array) for array in arrays]


@dataclass(frozen=True)
class BoundDense:
    """A dense query and its K/V. ``repeated``: where there have been others like it."""

    asked: Dense
    prefix: api.Prefix
    window: int
    repeated: api.Repeated | None = None

    @property
    def rows(self) -> int:
        return int(self.asked.q.shape[1])

    @property
    def extent(self) -> Extent:
        """How much there is to compute."""
        heads, queries, dim = self.asked.q.shape
        suffix = self.asked.suffix.num_tokens if self.asked.suffix else 0
        there = self.prefix.num_tokens
        return Extent(
            *(heads, self.prefix.num_kv_heads, queries, suffix, dim),
            seen=min(self.window or there, there),
            on_host=self.prefix.is_host,
        )

    @property
    def group(self) -> Hashable:
        """Queries of one layer, window and head map go over its rows together."""
        if self.rows > _MOST_SHARED_ROWS:
            return None
        heads = b"" if self.asked.head_map is None else self.asked.head_map.tobytes()
        return id(self.prefix), self.window, heads, self.asked.sizes.heads

    def alone(self) -> Arrays:
        return self.asked.reply(self.attended())

    def attended(self) -> api.Attended:
        """Output and log-sum-exp of all its queries at once."""
        asked = self.asked.aligned()
        if self.repeated is not None:
            return self.repeated(asked.q, asked.suffix)
        return api.attend_fused(asked.q, self.prefix, asked.suffix, asked.head_map, self.window)

    def together(self, others: Sequence[BoundDense]) -> list[Arrays]:
        """Replies of all, each as if it were alone, to the last bit."""
        everyone = [one.asked.aligned() for one in (self, *others)]
        queries = [(asked.q, asked.suffix) for asked in everyone]
        found = api.attend_each(queries, self.prefix, self.asked.head_map, self.window)
        return [asked.reply(one) for asked, one in zip(everyone, found, strict=True)]


class LongDense:
    """A dense query that is computed in parts, one a call. Never shares a pass.

    Without ``spans`` those of its extent.
    """

    group = None

    def __init__(self, whole: BoundDense, spans: Sequence[Span] = ()) -> None:
        self._whole = whole
        self._left = deque(spans)
        self._found: api.Attended | None = None

    @property
    def rows(self) -> int:
        return self._whole.rows

    def alone(self) -> Arrays | Progress:
        """The next part; after the last one the reply."""
        if self._found is None:
            self._whole = replace(self._whole, asked=self._whole.asked.aligned())
            self._left.extend([] if self._left else self._whole.extent.spans())
            q = self._whole.asked.q
            self._found = api.Attended(np.empty_like(q), np.empty(q.shape[:2], np.float32))
        span = self._left.popleft()
        part, rows = self._attended(span), slice(*span)
        self._found.out[:, rows], self._found.lse[:, rows] = part.out, part.lse
        return Progress.UNFINISHED if self._left else self._whole.asked.reply(self._found)

    def together(self, others: Sequence[Any]) -> list[Arrays]:
        raise AssertionError("long queries have no group")

    def _attended(self, span: Span) -> api.Attended:
        asked = self._whole.asked
        part = asked.part(span)
        found = replace(self._whole, asked=part).attended()
        if asked.suffix is None or part.suffix is not None:
            return found
        # every query of the part sees the whole suffix
        over_suffix = replace(part, suffix=asked.suffix).suffix_alone()
        return api.merge([found, api.Attended(*over_suffix)])


@dataclass(frozen=True)
class Sparse:
    """Head h of one query sees the tokens ``indices[h, :counts[h]]``."""

    sizes: Sizes
    q: Floats
    indices: NDArray[np.int32]
    counts: NDArray[np.uint32]

    @classmethod
    def of(cls, sizes: Sizes, most: int, q: Blob, indices: Blob, counts: Blob) -> Sparse:
        """From blobs, ``most`` indices a head. Raises CommandError."""
        heads = sizes.heads
        row = sizes.blob("indices", indices, heads, most).view("<i4")
        used = sizes.blob("counts", counts, heads).view("<u4")
        if int(used.max()) > most:
            raise CommandError(f"{sizes.where}: counts name {used.max()} of {most} indices")
        return cls(sizes, sizes.blob("Q", q, heads, sizes.dim), row, used)

    def bound(self, resident: Resident) -> Call[Arrays]:
        """With its slot. Raises CommandError where it does not fit."""
        window = self.sizes.check(resident)
        return Call(lambda: [self._attend(resident, window)], rows=1)

    def _attend(self, resident: Resident, window: int) -> Floats:
        """The output. Raises CommandError for an index outside of the prefix."""
        indices, counts = aligned(self.indices), aligned(self.counts)
        inside = (indices >= 0) & (indices < resident.tokens)
        used = np.arange(indices.shape[1]) < counts[:, None]
        if not bool((inside | ~used).all()):
            raise CommandError(f"{self.sizes.where}: an index is outside of the prefix")
        if resident.absent:
            # what is absent lies before the window, or the window would have been refused
            used &= indices >= resident.absent
            order = np.argsort(~used, axis=1, kind="stable")
            indices = np.take_along_axis(indices, order, axis=1) - np.int32(resident.absent)
            counts = used.sum(axis=1).astype(np.uint32)
        found = api.attend_sparse(aligned(self.q), resident.prefix, indices, counts, window=window)
        return np.asarray(found.out)


@dataclass(frozen=True)
class Auto:
    """One query sees the blocks that its keys choose, the tail, and a suffix."""

    sizes: Sizes
    q: Floats
    head_map: NDArray[np.uint8] | None
    selection: api.Selection
    suffix: api.Suffix | None = None

    def bound(self, resident: Resident) -> Call[Arrays]:
        """With its slot. Raises CommandError where it does not fit."""
        window = self.sizes.check(resident)
        return Call(lambda: [self._attend(resident.prefix, window).out], rows=1)

    def _attend(self, prefix: api.Prefix, window: int) -> api.Attended:
        return api.attend_sparse_auto_fused(
            *(aligned(self.q), prefix, aligned_suffix(self.suffix)),
            *(self.selection, self.head_map, window),
        )


Request = Dense | Sparse | Auto
