"""KV.PREFIX.PIN, UNPIN, EXPIRE and OWNER: how long a namespace stays, and where it is.

A pinned namespace is evicted after all others, within a cap (see ``PinLimits``); what
would go past the cap is refused. A namespace past its deadline is a miss at once; its
rows and states are dropped by the next housekeeping, as a logged effect.
"""

from __future__ import annotations

import time

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Effect, Reply, command
from pion_vllm_mlx.server.directory import sides_of
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.eviction import drop_namespace
from pion_vllm_mlx.server.store.index import group_of
from pion_vllm_mlx.server.store.records import Expire, Pin, Record
from pion_vllm_mlx.wire.resp import Arg, Simple

#: ten years; a deadline further away is a mistake in units.
MAX_EXPIRE_SECONDS = 315_360_000


def overdue(context: Context, sid: bytes) -> list[Record]:
    """The records that drop the namespace of a session where it is past its deadline."""
    namespace = group_of(sid)
    if not context.overdue(namespace):
        return []
    return drop_namespace(context.state, namespace, "expired", int(time.time()))


@command(
    "KV.PREFIX.PIN",
    2,
    "Has a namespace evicted after all that are not pinned; while one of those is being stored, a "
    "store that finds no other room is refused. Refused where pins would take more than half of "
    "the sessions or of the disk budget; 0 when there is none.",
    syntax="ns",
    write=True,
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
    extension=True,
)
def kv_prefix_pin(context: Context, args: list[Arg]) -> Effect:
    sides = context.sides(arguments.sid(args[1]))
    new = [session for session in sides if not session.pinned]
    if new:
        sessions, mine = context.state.sessions.values(), context.stored(b"")
        pinned = [one for one in sessions if one.pinned and one.sid.startswith(mine)]
        refusal = context.store.space.pin_limits.refusal(pinned, new)
        if refusal:
            raise CommandError(f"KV.PREFIX.PIN: {refusal}")
    effects = [Pin(tuple(session.sid for session in new), True)] if new else []
    return Effect(effects, int(bool(sides)))


@command(
    "KV.PREFIX.UNPIN",
    2,
    "Has a namespace evicted like any other; 0 when there is none.",
    syntax="ns",
    write=True,
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
    extension=True,
)
def kv_prefix_unpin(context: Context, args: list[Arg]) -> Effect:
    sides = context.sides(arguments.sid(args[1]))
    pinned = tuple(session.sid for session in sides if session.pinned)
    return Effect([Pin(pinned, False)] if pinned else [], int(bool(sides)))


@command(
    "KV.PREFIX.EXPIRE",
    3,
    "Drops a namespace after so many seconds (0: now, -1: never); 0 when there is none.",
    syntax="ns seconds",
    write=True,
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
    extension=True,
)
def kv_prefix_expire(context: Context, args: list[Arg]) -> Effect:
    sides = context.sides(arguments.sid(args[1]))
    seconds = arguments.integer(args[2], "KV.PREFIX.EXPIRE: seconds", -1, MAX_EXPIRE_SECONDS)
    if not sides:
        return Effect([], 0)
    deadline_ms = 0 if seconds < 0 else int(time.time() * 1000) + seconds * 1000
    return Effect([Expire(tuple(session.sid for session in sides), deadline_ms)], 1)


@command(
    "KV.PREFIX.OWNER",
    2,
    "The worker that holds a namespace, -1 when nobody does.",
    syntax="ns",
    kvcache=True,
    keys=(1, 1),
    tenant=True,
)
def kv_prefix_owner(context: Context, args: list[Arg]) -> Reply:
    namespace = arguments.sid(args[1])
    if context.sides(namespace):
        return Simple(str(context.server.ledger.worker_id))
    directory = context.server.directory
    owner = directory.home(sides_of(namespace))
    return Simple(str(-1 if owner is None or directory.expired(namespace) else owner))
