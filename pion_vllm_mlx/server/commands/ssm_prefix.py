"""SSM.PREFIX.*: recurrent states and completion records, opaque bytes by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from crc32c import crc32c

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Effect, Reply, command
from pion_vllm_mlx.server.commands.kv_prefix_keep import overdue
from pion_vllm_mlx.server.inbound import MemoryInbound, RefusedBulk, StreamInbound
from pion_vllm_mlx.server.outbound import Stream, file_range
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.index import StateBlob
from pion_vllm_mlx.server.store.records import DropStates, Record, StoreState
from pion_vllm_mlx.server.store.riding import rides_in_log
from pion_vllm_mlx.server.store.rows import WINDOW_BYTES, state_is_intact
from pion_vllm_mlx.server.store.segment import Region
from pion_vllm_mlx.server.store.space import disk_error
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.store.verifying import drop_damaged_state
from pion_vllm_mlx.server.upload_room import UploadRoom
from pion_vllm_mlx.wire.resp import Arg, BulkTarget, Simple

OK = Simple("OK")
MAX_STATE_LAYER = 65535


def _namespaces(sid: bytes) -> Iterator[bytes]:
    """The namespaces whose states may lie under a sid: its own, and of ``ns@…`` ``ns``."""
    yield sid
    at = sid.find(b"@")
    while at >= 0:
        yield sid[:at]
        at = sid.find(b"@", at + 1)


class StateInbound(StreamInbound):
    """A long state, received straight into a segment."""

    region: Region
    crc: int = 0

    def take(self, window: memoryview) -> None:
        self.region.write(window, self.written)
        self.crc = crc32c(window, self.crc)
        self.written += len(window)

    written: int = 0


def open_state(context: Context, args: list[Arg], length: int) -> BulkTarget:
    """Where the blob of the SSM.PREFIX.STORE being received goes. Raises CommandError."""
    if len(args) != 3:
        raise CommandError("argument is too long")
    sid = arguments.sid(args[1])
    arguments.integer(args[2], "layer", 0, MAX_STATE_LAYER)
    pool, when_room, store = context.server.pool, context.when_room, context.store
    if length <= WINDOW_BYTES:
        return MemoryInbound(length, pool, when_room)
    region = store.space.reserve(sid, length, 1)
    inbound = StateInbound(
        length, 1, lambda window: inbound.take(window), store.io, pool, when_room
    )
    inbound.region = region
    inbound.abandon = lambda: store.space.release(region)
    inbound.room = UploadRoom(store, pool, when_room)
    return inbound


@dataclass
class StoredState:
    """A state that is in its place and waits for its record."""

    sid: bytes
    layer: int
    length: int
    crc: int
    region: Region | None
    blob: bytes

    def finish(self, store: Store, applied: bool) -> None:
        """The record is applied, or the command was refused: the region's writer is done."""
        if self.region is not None:
            store.space.release(self.region, applied)


async def store_state(context: Context, args: list[Arg]) -> StoredState:
    """Check the command, wait for its blob and put it in its place."""
    where = "SSM.PREFIX.STORE"
    sid = arguments.sid(args[1])
    layer = arguments.integer(args[2], "layer", 0, MAX_STATE_LAYER)
    given = arguments.options(args[4:], {"CRC": 1}, where)
    expected = arguments.integer(given["CRC"][0], "CRC", 0, 0xFFFFFFFF) if given else None
    blob = args[3]
    if isinstance(blob, StateInbound):
        await blob.wait()
        await context.store.make_room(0)
        stored = StoredState(sid, layer, blob.length, blob.crc, blob.region, b"")
    elif isinstance(blob, (bytes, MemoryInbound)):
        stored = await _from_memory(context, sid, layer, blob)
    elif isinstance(blob, RefusedBulk):
        raise blob.reason
    else:
        raise CommandError("argument is too long")
    if expected is not None and expected != stored.crc:
        stored.finish(context.store, False)
        raise CommandError(f"{where}: checksum of the blob is wrong")
    return stored


async def _from_memory(
    context: Context, sid: bytes, layer: int, blob: bytes | MemoryInbound
) -> StoredState:
    store = context.store
    view = memoryview(blob) if isinstance(blob, bytes) else blob.view
    crc = crc32c(view)
    others = len(context.state.states.get(sid, {}).keys() - {layer})
    if rides_in_log(store.config, len(view), others):
        await store.make_room_in_log(len(view))
        return StoredState(sid, layer, len(view), crc, None, bytes(view))
    region = await store.reserve(sid, len(view), 1)
    try:
        await store.run(lambda: region.write(view, 0))
    except OSError as error:
        store.space.release(region)
        raise disk_error(error) from error
    return StoredState(sid, layer, len(view), crc, region, b"")


@command(
    "SSM.PREFIX.STORE",
    -4,
    "Stores opaque bytes under a session and layer.",
    syntax="sid layer blob [CRC crc32c]",
    extensions=("CRC",),
    write=True,
    keys=(1, 1),
    tenant=True,
    grows=True,
    prepare=store_state,
    open_bulk=open_state,
)
def ssm_prefix_store(context: Context, args: list[Arg], stored: StoredState) -> Effect:
    segment, offset = "", 0
    if stored.region is not None:
        segment, offset = stored.region.segment.name, stored.region.offset
    record = StoreState(
        stored.sid, stored.layer, stored.length, stored.crc, segment, offset, stored.blob
    )
    # what is past its deadline goes first, or this state would go along with it
    late: list[Record] = []
    for namespace in _namespaces(stored.sid):
        late += overdue(context, namespace)
    return Effect([*late, record], OK)


async def _verified(context: Context, sid: bytes, blob: StateBlob) -> bool:
    """Check a state once after a start; one that does not verify takes its prefix along."""
    if blob.verified:
        return True
    if await context.store.run(lambda: state_is_intact(blob)):
        blob.verified = True
        return True
    await drop_damaged_state(context.store, sid, blob, "checksum of a state is wrong")
    return False


@command(
    "SSM.PREFIX.FETCH",
    3,
    "The bytes stored under a session and layer.",
    syntax="sid layer",
    keys=(1, 1),
    tenant=True,
)
async def ssm_prefix_fetch(context: Context, args: list[Arg]) -> Reply:
    sid = arguments.sid(args[1])
    layer = arguments.integer(args[2], "layer", 0, MAX_STATE_LAYER)
    blob = context.state.states.get(sid, {}).get(layer)
    if blob is None or any(map(context.overdue, _namespaces(sid))):
        return None
    context.state.touch_states(sid)
    piece = file_range(blob.place, 0, blob.length)
    if not await _verified(context, sid, blob):
        return None
    stream = Stream()
    stream.bulk([piece])
    stream.payload_bytes = 0
    return stream


@command(
    "SSM.PREFIX.DROP",
    -2,
    "Forgets one layer, or all layers, of a session.",
    syntax="sid [layer]",
    write=True,
    keys=(1, 1),
    tenant=True,
)
def ssm_prefix_drop(context: Context, args: list[Arg]) -> Effect:
    if len(args) > 3:
        raise CommandError("wrong number of arguments for 'ssm.prefix.drop' command")
    sid = arguments.sid(args[1])
    layer = -1
    if len(args) == 3:
        layer = arguments.integer(args[2], "layer", 0, MAX_STATE_LAYER)
    held = context.state.states.get(sid, {})
    there = bool(held) if layer < 0 else layer in held
    return Effect([DropStates((sid,), layer)] if there else [], OK)
