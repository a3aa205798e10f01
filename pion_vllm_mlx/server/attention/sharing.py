"""Slots that begin alike keep the blocks that they have in common once.

Only K/V that came by KV.PREFIX.WARM's CHAIN take part. One that shares nothing lies contiguously;
as soon as a second one begins with the same block, those of its owner, layer, shape and type are
laid out over one pool and attended through tables. When one leaves, what only it had comes free,
and the last one left lies contiguously again.

Layouts are made off the event loop, of what nobody changes, and put in place on it. A query under
way keeps the one it began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from pion_vllm_mlx.kernels import paging
from pion_vllm_mlx.kernels.prefix import Prefix
from pion_vllm_mlx.server.attention import placement
from pion_vllm_mlx.server.attention.engine import Engine
from pion_vllm_mlx.server.attention.resident import Resident
from pion_vllm_mlx.server.attention.shared_blocks import BlockPool, Share
from pion_vllm_mlx.server.attention.slots import Key, Slot, SlotTable

#: runs a call on a thread that may take its time.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
Check: TypeAlias = Callable[[Resident], None]
Put: TypeAlias = Callable[[Resident], None]

log = logging.getLogger(__name__)


class _Mate(NamedTuple):
    """A WARM slot, and what it held when it was looked at."""

    key: Key
    slot: Slot[Resident]
    held: Resident


class Sharing:
    """Lays the slots of a table out. Belongs to the event loop."""

    def __init__(
        self, slots: SlotTable[Resident], run: Run, engine: Engine, device: Callable[[], str]
    ) -> None:
        """``device`` says where K/V are kept: ``placement.HOST`` or a GPU."""
        self._slots, self._run, self._engine, self._device = slots, run, engine, device
        self._lock = asyncio.Lock()
        self._loose: dict[int, BlockPool] = {}
        self._tidying: asyncio.Task[None] | None = None
        slots.on_loose = self._loosened

    async def put(self, key: Key, resident: Resident, check: Check, put: Put) -> None:
        """Have ``put`` make a layer WARM, laid out with those that it has blocks in common with.

        ``resident`` is on the host. What ``check`` raises of it is raised, and nothing has changed.
        """
        async with self._lock:
            mates = self._mates_of(key, resident)
            laid = await self._laid_out([*(one.held for one in mates), resident])
            check(laid[-1])
            self._exchange(mates, laid)
            put(laid[-1])
            share = laid[-1].share
            if share is not None and share.pool.is_loose:
                self._loosened(share.pool)

    def close(self) -> None:
        """Lay nothing out any more."""
        if self._tidying is not None:
            self._tidying.cancel()

    # -- inside ---------------------------------------------------------------

    def _mates_of(self, key: Key, resident: Resident) -> list[_Mate]:
        """Those that may have blocks in common with a layer that is about to be WARM."""
        owner = self._slots.owner or (lambda sid: b"")
        if not resident.family:
            return []
        return [
            _Mate(other, slot, slot.held)
            for other, slot in self._slots.warm.items()
            if slot.held.family == resident.family
            and other != key
            and other.layer == key.layer
            and owner(other.sid) == owner(key.sid)
        ]

    def _exchange(self, mates: Sequence[_Mate], laid: Sequence[Resident]) -> None:
        """Put a layout in place where the slots are still what they were."""
        for mate, new in zip(mates, laid, strict=False):
            here = self._slots.warm.get(mate.key) is mate.slot
            if here and mate.slot.held is mate.held and new is not mate.held:
                self._slots.exchange(mate.slot, new)

    def _loosened(self, pool: BlockPool) -> None:
        """Lay a pool out again, soon."""
        self._loose[id(pool)] = pool
        if self._tidying is None or self._tidying.done():
            self._tidying = asyncio.get_running_loop().create_task(self._tidy())

    async def _tidy(self) -> None:
        try:
            while self._loose:
                async with self._lock:
                    await self._tighten(self._loose.popitem()[1])
        except (MemoryError, RuntimeError) as error:  # no room, or the server is about to end
            log.warning("blocks of attention that nobody uses stay for now: %s", error)

    async def _tighten(self, pool: BlockPool) -> None:
        """Lay the slots of a pool out again, if it is still loose."""
        mates = [
            _Mate(key, slot, slot.held)
            for key, slot in self._slots.warm.items()
            if slot.held.share is not None and slot.held.share.pool is pool
        ]
        if not mates or not pool.is_loose:
            return
        laid = await self._laid_out([one.held for one in mates])
        self._exchange(mates, laid)
        pools = [one.share.pool for one in laid if one.share is not None]
        # some may have left meanwhile
        self._loose |= {id(one): one for one in pools if one.is_loose}

    async def _laid_out(self, residents: Sequence[Resident]) -> list[Resident]:
        """The same K/V, blocks that are equal once; on the device where attention runs."""
        if self._device() == placement.HOST:
            laid: list[Resident] = await self._run(lambda: _laid_out(residents))
            return laid
        prefixes = await self._engine.call(lambda: placement.on_host(residents))
        laid = await self._run(lambda: _laid_out(residents, prefixes))
        return await self._engine.call(lambda: placement.all_on_device(laid))


def _laid_out(
    residents: Sequence[Resident], prefixes: Sequence[Prefix] | None = None
) -> list[Resident]:
    """See ``paging.pooled``; ``prefixes``: their rows on the host where they lie elsewhere."""
    if len(residents) == 1 and residents[0].share is None:
        return list(residents)
    pooled = paging.pooled(prefixes or [one.prefix for one in residents])
    pool = BlockPool(pooled.num_blocks, pooled.block_bytes)
    return [
        one if one.share is None and prefix.table is None else _with(one, prefix, pool)
        for one, prefix in zip(residents, pooled.prefixes, strict=True)
    ]


def _with(resident: Resident, prefix: Prefix, pool: BlockPool) -> Resident:
    share = None if prefix.table is None else Share(pool, prefix.table)
    return Resident(prefix, resident.absent, resident.family, share)
