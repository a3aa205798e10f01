"""V.CREATE, V.INFO, V.DROP: sessions by themselves."""

from __future__ import annotations

import time

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import get_format, resolve
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Effect, Reply, command
from pion_vllm_mlx.server.commands.kv_prefix import kv_prefix_info, same_schema
from pion_vllm_mlx.server.commands.kv_prefix_keep import overdue
from pion_vllm_mlx.server.commands.vstore_schema import (
    DEFAULT_FORMAT,
    MAX_WIDTH,
    parse_schema,
    split_name,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.eviction import drop_session
from pion_vllm_mlx.server.store.index import Session
from pion_vllm_mlx.server.store.records import Create, Record
from pion_vllm_mlx.wire.resp import Arg


def _asked(args: list[Arg]) -> Create:
    """The session that a V.CREATE describes. Raises CommandError."""
    sid = arguments.sid(args[1])
    if len(args) > 3 and arguments.word(args[3]).upper() == b"SCHEMA":
        dim = arguments.integer(args[2], "default_dim", 0, MAX_WIDTH)
        return parse_schema(sid, dim, args[4:])
    dim = arguments.integer(args[2], "dim", 1, MAX_WIDTH)
    given = arguments.options(args[3:], {"VQUANT": 1}, "V.CREATE")
    requested = DEFAULT_FORMAT
    if "VQUANT" in given:
        requested = get_format(arguments.word(given["VQUANT"][0]).decode("latin-1")).name
    return Create(sid, dim, requested, resolve(requested, dim).name)


@command(
    "V.CREATE",
    -3,
    "Creates a session, or finds it; its slot.",
    syntax="sid dim [VQUANT format|SCHEMA n_layers spec...]",
    write=True,
    kvcache=True,
    keys=(1, 1),
    tenant=True,
    grows=True,
)
def v_create(context: Context, args: list[Arg]) -> Effect:
    record = _asked(args)
    sid = record.sid
    session = context.live(sid)
    if session is not None and same_schema(session, record):
        context.state.touch(session)
        return Effect([], _slot(context, sid))
    if session is not None and not session.empty:
        raise CommandError("V.CREATE: already exists with a different schema")
    owner = context.server.directory.claim([sid])
    if owner is not None:
        raise CommandError(f"session lives on worker {owner}")
    gone = context.store.space.evict_for_sessions([] if session else [sid])
    gone += overdue(context, sid)
    return Effect([*gone, record], lambda: _slot(context, sid))


def _shown(sid: bytes) -> str:
    """A session id on one line."""
    text = sid.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _slot(context: Context, sid: bytes) -> int:
    """The slot of a session; a tenant's are counted without those of others."""
    sessions = context.state.sessions
    slot = sessions[sid].slot
    if not context.client.tenant:
        return slot
    mine = context.stored(b"")
    return sum(other.slot < slot for name, other in sessions.items() if name.startswith(mine))


def _info(session: Session, name: bytes) -> str:
    heterogeneous = len({(s.width, s.fmt) for s in session.specs.values()}) > 1
    first = session.specs.get(0)
    lines = [
        f"session:{_shown(name)}",
        f"dim:{session.dim}",
        f"v_format:{split_name(first.fmt if first else session.fmt)[0]}",
        f"schema:{'heterogeneous' if heterogeneous else 'uniform'}",
    ]
    lines += [f"layer_{n}_tokens:{rows.count}" for n, rows in sorted(session.layers.items())]
    if heterogeneous:
        for layer, spec in session.specs.items():
            fmt, rope = split_name(spec.fmt)
            lines += [f"layer_{layer}_dim:{spec.width}", f"layer_{layer}_fmt:{fmt}"]
            lines += [f"layer_{layer}_rope:{rope}"] if rope else []
    lines += [f"bytes:{session.row_bytes()}", f"snapshots:{len(session.rollback)}"]
    return "".join(line + "\r\n" for line in lines)


@command(
    "V.INFO",
    -1,
    "One session in numbers, nil when there is none; without a name the V-store.",
    syntax="[sid]",
    kvcache=True,
    home="session",
    keys=(1, -1),
    tenant=True,
)
def v_info(context: Context, args: list[Arg]) -> Reply:
    if len(args) > 2:
        raise CommandError("wrong number of arguments for 'v.info' command")
    if len(args) == 1:
        return "enabled:1\r\n" + str(kv_prefix_info(context, args))
    session = context.live(arguments.sid(args[1]))
    return None if session is None else _info(session, context.shown(session.sid))


@command(
    "V.FREE",
    -2,
    "Another name of V.DROP.",
    syntax="sid...",
    write=True,
    kvcache=True,
    home="session",
    keys=(1, -1),
    tenant=True,
    extension=True,
)
@command(
    "V.DROP",
    -2,
    "Frees sessions; how many there were.",
    syntax="sid...",
    write=True,
    kvcache=True,
    home="session",
    keys=(1, -1),
    tenant=True,
    extension=True,
)
def v_drop(context: Context, args: list[Arg]) -> Effect:
    sids = dict.fromkeys(arguments.sid(arg) for arg in args[1:])
    found = [context.state.sessions[sid] for sid in sids if sid in context.state.sessions]
    held = sum(context.live(session.sid) is not None for session in found)
    effects: list[Record] = []
    for session in found:
        effects += drop_session(context.state, session, "dropped", int(time.time()))
    return Effect(effects, held)
