"""STATE.*: fixed-size slots, overwritten in place; memory only."""

from __future__ import annotations

from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.memory.state_slots import MAX_SLOT_BYTES, MAX_SLOTS, Slot
from pion_vllm_mlx.server.memory_command import on_name
from pion_vllm_mlx.server.outbound import bulk_in_memory
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
#: what is copied without leaving the event loop.
_SHORT_COPY_BYTES = 1 << 20
_INT64 = 1 << 63


@on_name(
    "STATE.ALLOC",
    -3,
    "Makes a slot of so many zero bytes, fixed or a ring.",
    syntax="slot_id size [MODE (FIXED|RING)]",
    grows=True,
)
def state_alloc(context: Context, args: list[Arg]) -> Reply:
    slot_id = arguments.sid(args[1])
    size = arguments.integer(args[2], "size", 1, MAX_SLOT_BYTES)
    given = arguments.options(args[3:], {"MODE": 1}, "STATE.ALLOC")
    words = given.get("MODE", [b"FIXED"])
    mode = arguments.choice(words[0], ("FIXED", "RING"), "STATE.ALLOC: MODE")
    if context.server.shares is not None:
        context.server.shares.check_slot(slot_id)
    context.charge(size)
    context.server.memory.states.alloc(slot_id, size, mode == "RING")
    return OK


def _place(context: Context, args: list[Arg], length: int) -> tuple[Slot, int]:
    """The slot of a command and where ``length`` bytes at its offset begin."""
    slot = context.server.memory.states.get(arguments.sid(args[1]))
    offset = arguments.integer(args[2], "offset", -_INT64, _INT64 - 1)
    return slot, slot.place(offset, length)


@on_name(
    "STATE.WRITE",
    4,
    "Overwrites bytes of a slot; a ring wraps.",
    syntax="slot_id offset blob",
    grows=True,
    long_arguments=True,
)
async def state_write(context: Context, args: list[Arg]) -> Reply:
    data = arguments.data(args[3])
    slot, at = _place(context, args, len(data))
    async with slot.lock:
        if len(data) <= _SHORT_COPY_BYTES:
            slot.write(at, data)
        else:
            await context.store.run(lambda: slot.write(at, data))
    return len(data)


@on_name(
    "STATE.READ",
    4,
    "Bytes of a slot; a ring wraps.",
    syntax="slot_id offset length",
)
async def state_read(context: Context, args: list[Arg]) -> Reply:
    length = arguments.integer(args[3], "length", 1, _INT64 - 1)
    slot, at = _place(context, args, length)
    async with slot.lock:
        if length <= _SHORT_COPY_BYTES:
            copy = slot.read(at, length)
        else:
            copy = await context.store.run(lambda: slot.read(at, length))
    return bulk_in_memory([copy])


@on_name(
    "STATE.FREE",
    2,
    "Forgets a slot.",
    syntax="slot_id",
)
def state_free(context: Context, args: list[Arg]) -> Reply:
    return int(context.server.memory.states.free(arguments.sid(args[1])))


@command(
    "STATE.INFO",
    -1,
    "The slots in numbers, or one of them.",
    syntax="[slot_id]",
    kvcache=True,
)
def state_info(context: Context, args: list[Arg]) -> Reply:
    arguments.at_most(args, 2, "STATE.INFO")
    states = context.server.memory.states
    if len(args) == 1:
        return arguments.lines(enabled=1, sessions=len(states.slots), max_sessions=MAX_SLOTS)
    slot = states.get(arguments.sid(args[1]))
    return arguments.lines(
        size=slot.size,
        mode="ring" if slot.ring else "fixed",
        bytes_written=slot.bytes_written,
        bytes_read=slot.bytes_read,
    )
