"""V.SNAPSHOT, V.RESTORE, V.COMMIT: rollback points of a session.

A point is the token count of every layer, in memory only. Restoring shortens the layers
that grew since, by one logged record. COMMIT seals a branch: what was stored since its
point is final, and the point is gone. (Elsewhere the three words have been explained as
taking, sealing and loading a copy of the store; KV.PREFIX.SAVE does that here.)
"""

from __future__ import annotations

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Effect, Reply, command
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.index import Session
from pion_vllm_mlx.server.store.records import Record, Truncate
from pion_vllm_mlx.wire.resp import Arg, Simple

MAX_POINTS = 16
_LARGEST_ID = (1 << 63) - 1


def _session(context: Context, sid: bytes, where: str) -> Session:
    session = context.live(sid)
    if session is None:
        raise CommandError(f"{where}: session not found")
    return session


@command(
    "V.SNAPSHOT",
    2,
    "Remembers the length of every layer of a session, in memory; the id of this point.",
    syntax="sid",
    kvcache=True,
    home="session",
    keys=(1, 1),
    tenant=True,
)
def v_snapshot(context: Context, args: list[Arg]) -> Reply:
    session = _session(context, arguments.sid(args[1]), "V.SNAPSHOT")
    if len(session.rollback) >= MAX_POINTS:
        raise CommandError("V.SNAPSHOT: no free snapshot slot")
    point = context.server.rollback_ids.next(session.sid)
    session.rollback[point] = {layer: rows.count for layer, rows in session.layers.items()}
    return point


@command(
    "V.RESTORE",
    3,
    "Cuts every layer to its length at a rollback point; rows overwritten since then stay so.",
    syntax="sid snap_id",
    write=True,
    kvcache=True,
    home="session",
    keys=(1, 1),
    tenant=True,
)
def v_restore(context: Context, args: list[Arg]) -> Effect:
    session = _session(context, arguments.sid(args[1]), "V.RESTORE")
    point = arguments.integer(args[2], "V.RESTORE: snap_id", 1, _LARGEST_ID)
    counts = session.rollback.get(point)
    if counts is None:
        raise CommandError("V.RESTORE: unknown snap_id")
    shorter = {
        layer: counts.get(layer, 0)
        for layer, rows in session.layers.items()
        if rows.count > counts.get(layer, 0)
    }
    effects: list[Record] = [Truncate(session.sid, shorter)] if shorter else []
    return Effect(effects, Simple("OK"))


@command(
    "V.COMMIT",
    3,
    "Releases a rollback point, what was stored since stays; 0 when the point is gone.",
    syntax="sid snap_id",
    kvcache=True,
    home="session",
    keys=(1, 1),
    tenant=True,
)
def v_commit(context: Context, args: list[Arg]) -> Reply:
    session = _session(context, arguments.sid(args[1]), "V.COMMIT")
    point = arguments.integer(args[2], "V.COMMIT: snap_id", 1, _LARGEST_ID)
    return 0 if session.rollback.pop(point, None) is None else 1
