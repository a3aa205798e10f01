"""The attention cache of a worker: K/V of layers, and the queries over them.

Memory only. Slots are a cache: they leave when others need the room, also those of a
tenant, whose quota bounds their bytes by themselves. Before a write is refused for want of
memory they leave, too. A namespace that is dropped, or expires, takes along
what was made from its rows; one that is evicted from disk does not, what is resident is
as true as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.attention import placement
from pion_vllm_mlx.server.attention.engine import Engine
from pion_vllm_mlx.server.attention.requests import Arrays, Auto, BoundDense, Dense, Request
from pion_vllm_mlx.server.attention.resident import (
    Blob,
    Resident,
    Shape,
    from_floats,
    resident_bytes,
)
from pion_vllm_mlx.server.attention.sharing import Check, Sharing
from pion_vllm_mlx.server.attention.slots import Key, Slot, SlotTable
from pion_vllm_mlx.server.store.index import group_of
from pion_vllm_mlx.server.store.records import Drop, Record
from pion_vllm_mlx.server.store.store import Store

T = TypeVar("T")

#: runs a call on a thread that may take its time.
Run = Callable[[Callable[[], Any]], Awaitable[Any]]
#: why a namespace's rows left, where its attention has to leave, too.
_FINAL = ("dropped", "expired")


@dataclass(frozen=True)
class AttentionSettings:
    """How a server attends.

    ``budget`` in bytes, 0 for none; ``dtype`` of ``resident.DTYPES``; ``device``: ``cpu``, or
    the GPU that is wanted, ``metal`` or ``cuda``; ``window``: of queries that name none, 0 for
    the whole prefix.
    """

    budget: int = 0
    dtype: str = "fp32"
    device: str = "cpu"
    window: int = 0


class AttentionCache:
    """See the module's docstring. Belongs to the event loop."""

    def __init__(self, settings: AttentionSettings, run: Run) -> None:
        self.settings = settings
        self.slots: SlotTable[Resident] = SlotTable(settings.budget)
        self.engine = Engine()
        self.sharing = Sharing(self.slots, run, self.engine, lambda: self.device)
        self.device = placement.HOST
        #: whether the process is past its limit of memory
        self.short_of_memory: Callable[[], bool] = lambda: False
        self._run = run

    async def start(self) -> str:
        """Find the device; a notice where it is not the one that was asked for.

        Raises ConfigError for kernels that cannot run here.
        """
        wanted = self.settings.device
        self.device = await self.engine.call(lambda: placement.find_device(wanted))
        if wanted in (placement.HOST, self.device):
            return ""
        return f"attention: no {wanted} device here, it runs on: {self.device}"

    def sparable(self) -> int:
        """Bytes of the process's memory that ``spare`` could free.

        None of a GPU's: what is freed there stays with MLX.
        """
        return self.slots.nbytes if self.device == placement.HOST else 0

    def spare(self, nbytes: int) -> None:
        """Demote until so many bytes came free, or nothing is left."""
        self.slots.spare(nbytes)

    def fields(self) -> dict[str, int]:
        """What KV.PREFIX.INFO tells."""
        slots, engine = self.slots, self.engine
        return {
            "sdpa_warm": len(slots.warm),
            "sdpa_cold": len(slots.cold),
            "sdpa_demotions": slots.counters.demotions,
            "sdpa_rehydrates": slots.counters.rehydrates,
            "sdpa_bytes": slots.nbytes,
            "sdpa_queries": engine.queries,
            "sdpa_shared_passes": engine.shared_passes,
        }

    def window(self, asked: int) -> int:
        """A query's window: its own, or for −1 the server's."""
        return self.settings.window if asked < 0 else asked

    async def store(self, key: Key, shape: Shape, keys: Blob, values: Blob) -> None:
        """Keep float32 K and V ``[H, N, D]`` of a layer. Raises CommandError, OutOfMemory."""
        for name, blob in (("K", keys), ("V", values)):
            if len(blob) != shape.side_bytes:
                raise CommandError(
                    f"ATTEND.PREFIX.STORE: {name} blob size {len(blob)} "
                    f"instead of {shape.side_bytes}"
                )
        dtype = self.settings.dtype
        self.slots.check_fits(key.sid, resident_bytes(shape, dtype))
        k, v = shape.floats(keys), shape.floats(values)
        resident = await self._run(lambda: from_floats(k, v, dtype))
        self.put(key, await self.placed(resident))

    async def placed(self, resident: Resident) -> Resident:
        """The same K/V on the device where attention runs."""
        if self.device == placement.HOST:
            return resident
        return await self.engine.call(lambda: placement.on_device(resident))

    def put(self, key: Key, resident: Resident, *sources: bytes) -> None:
        """Make a layer WARM; ``sources``: the namespaces whose rows it was made from."""
        self.slots.put(key, Slot(resident, sources), rehydrates=bool(sources))

    async def put_shared(
        self, key: Key, resident: Resident, sources: Sequence[bytes], check: Check
    ) -> None:
        """The same of K/V on the host; blocks that others have, too, are kept once.

        Raises OutOfMemory, and what ``check`` raises when all is ready.
        """

        def fits(laid: Resident) -> None:
            check(laid)
            self.slots.check_fits(key.sid, laid.nbytes)

        await self.sharing.put(key, resident, fits, lambda laid: self.put(key, laid, *sources))

    def query(
        self, key: Key, request: Request, wanted: Callable[[], bool] = lambda: True
    ) -> Awaitable[Arrays]:
        """Begin a query; the arrays of its reply. Raises ColdMiss, NotStored, CommandError.

        Where ``wanted``, asked from another thread, says no, it is not computed.
        """
        pending = self.query_then(key, request, lambda arrays: arrays, wanted)
        return self._fitting(key, pending) if isinstance(request, Auto) else pending

    def query_then(
        self,
        key: Key,
        request: Request,
        then: Callable[[Arrays], T],
        wanted: Callable[[], bool] = lambda: True,
    ) -> asyncio.Future[T]:
        """The same; what ``then`` makes of the arrays, on the thread that computed them.

        By then all has changed that a query changes for others, but for what an ``Auto`` adds.
        """
        slot = self.slots.find(key)

        def answered(arrays: Arrays) -> T:
            self.slots.touch(key, slot)
            return then(arrays)

        return self.engine.begin_then(request.bound(slot.held), answered, wanted)

    def attended_now(self, key: Key, request: Dense) -> Arrays | None:
        """The arrays of a query's reply, on the thread that attends.

        None for what is not resident, or takes long: the event loop knows what to do with it.
        Raises CommandError where the query does not fit.
        """
        slot = self.slots.warm.get(key)
        work = None if slot is None else request.bound(slot.held)
        if slot is None or not isinstance(work, BoundDense):
            return None
        arrays = work.alone()
        self.slots.touch(key, slot)
        self.engine.queries += 1
        return arrays

    async def _fitting(self, key: Key, pending: Awaitable[Arrays]) -> Arrays:
        """Block statistics are made by the first query that needs them; looks at every slot."""
        try:
            return await pending
        finally:
            short = self.device == placement.HOST and self.short_of_memory()
            self.slots.fit(key, keep_derived=not short)

    def follow(self, store: Store) -> None:
        """Forget from now on what the store drops for good."""
        others = store.on_effects

        def told(effects: Sequence[Record]) -> None:
            others(effects)
            self._dropped(effects)

        store.on_effects = told

    def _dropped(self, effects: Sequence[Record]) -> None:
        sids = [
            sid
            for effect in effects
            if isinstance(effect, Drop) and effect.reason in _FINAL
            for sid in effect.sids
        ]
        if sids:
            self.slots.forget({group_of(sid) for sid in sids})

    def close(self) -> None:
        """Compute nothing more."""
        self.sharing.close()
        self.engine.close()
