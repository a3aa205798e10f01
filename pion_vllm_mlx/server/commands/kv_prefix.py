"""KV.PREFIX.*: namespaces, whether they are there, and making them durable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import get_format, resolve
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Effect, Reply, command
from pion_vllm_mlx.server.commands.kv_prefix_blocks import blocks_effect, parse_blocks
from pion_vllm_mlx.server.commands.kv_prefix_keep import overdue
from pion_vllm_mlx.server.directory import sides_of
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.blocks import BlockTable
from pion_vllm_mlx.server.store.eviction import drop_namespace
from pion_vllm_mlx.server.store.folder_use import left_behind
from pion_vllm_mlx.server.store.index import KEY_SUFFIX, MAX_LAYER, VALUE_SUFFIX, Session
from pion_vllm_mlx.server.store.records import Create, Record
from pion_vllm_mlx.server.store.shapes import check_width
from pion_vllm_mlx.server.store.snapshot import may_replace
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
MAX_PREFILL_MS = 86_400_000
#: file systems allow 255, and the file has a longer name while it is written.
MAX_FILE_NAME_BYTES = 240
#: the ids of its sessions are three bytes longer.
MAX_NAMESPACE_BYTES = 65_535 - len(KEY_SUFFIX)

_REGISTER_OPTIONS = {"BLOCKS": 3, "PREFILL_MS": 1, "HEADS": 1, "LEAVES": 1}
_REGISTER_SYNTAX = (
    "ns kv_dim format [BLOCKS block_size count hashes] [PREFILL_MS ms] [HEADS heads] [LEAVES json]"
)

Specs = dict[int, tuple[int, str, int]]


def _vquant(arg: Arg, where: str) -> str:
    name = arguments.word(arg).decode("latin-1").lower()
    try:
        return get_format(name).name
    except CommandError:
        raise CommandError(f"{where} unknown vquant '{name[:64]}'") from None


def _leaf_side(leaf: Mapping[str, Any], side: str) -> tuple[int, str, int]:
    """Width, format and heads of one side of a LEAVES entry."""
    if not isinstance(leaf, dict) or not leaf.keys() >= {side, "heads", "format"}:
        raise ValueError('a leaf is an object with "k", "v", "heads" and "format"')
    width, heads = leaf[side], leaf["heads"]
    fmt = leaf.get(f"{side}_format", leaf["format"])
    if not (isinstance(width, int) and isinstance(heads, int) and isinstance(fmt, str)):
        raise ValueError("widths and heads are integers, formats are text")
    check_width(width)
    if not 0 <= heads <= 1024:
        raise ValueError("heads are 0 to 1024")
    return width, resolve(fmt, width).name, heads


def parse_leaves(arg: Arg) -> tuple[Specs, Specs]:
    """Specs of the K and V side by layer, from the JSON of LEAVES."""
    where = "KV.PREFIX.REGISTER LEAVES"
    try:
        leaves = json.loads(bytes(arguments.word(arg)))
        if not isinstance(leaves, list) or not 0 < len(leaves) <= MAX_LAYER + 1:
            raise ValueError(f"a list of 1 to {MAX_LAYER + 1} leaves is needed")
        sides = [(_leaf_side(leaf, "k"), _leaf_side(leaf, "v")) for leaf in leaves]
    except (ValueError, RecursionError, CommandError) as error:
        raise CommandError(f"{where}: {error}") from None
    return dict(enumerate(k for k, _ in sides)), dict(enumerate(v for _, v in sides))


def same_schema(session: Session, record: Create) -> bool:
    """Whether a session is what a CREATE asks for."""
    specs = {n: (spec.width, spec.fmt, spec.heads) for n, spec in session.specs.items()}
    asked = (record.dim, record.requested, record.heads, record.specs)
    return (session.dim, session.requested, session.heads, specs) == asked


@command(
    "KV.PREFIX.REGISTER",
    -4,
    "Creates the K and V sessions of a namespace, or finds them; BLOCKS and PREFILL_MS replace.",
    syntax=_REGISTER_SYNTAX,
    extensions=("HEADS", "LEAVES"),
    write=True,
    kvcache=True,
    keys=(1, 1),
    tenant=True,
    grows=True,
)
def kv_prefix_register(context: Context, args: list[Arg]) -> Effect:
    where = "KV.PREFIX.REGISTER"
    namespace = arguments.sid(args[1])
    if len(namespace) > MAX_NAMESPACE_BYTES:
        raise CommandError(f"{where}: a namespace has 1 to {MAX_NAMESPACE_BYTES} bytes")
    dim = arguments.integer(args[2], "kv_dim", 1, 65536)
    requested = _vquant(args[3], where)
    given = arguments.options(args[4:], _REGISTER_OPTIONS, where)
    prefill = arguments.given_integer(given, "PREFILL_MS", 0, MAX_PREFILL_MS)
    heads = _heads(given, dim, where)
    specs = parse_leaves(given["LEAVES"][0]) if "LEAVES" in given else ({}, {})
    table = parse_blocks(given["BLOCKS"]) if "BLOCKS" in given else None
    creates = [
        Create(namespace + suffix, dim, requested, resolve(requested, dim).name, heads, side)
        for suffix, side in zip((KEY_SUFFIX, VALUE_SUFFIX), specs, strict=True)
    ]
    effects = _missing(context, creates) if _lives_here(context, namespace, table) else []
    tells_prefill = bool(prefill or effects)
    if table is not None:
        effects += blocks_effect(context, namespace, table, effects)

    def registered() -> Reply:
        if tells_prefill:
            context.server.directory.set_prefill(namespace, prefill)
        return OK

    return Effect(effects, registered)


def _heads(given: Mapping[str, list[Arg]], dim: int, where: str) -> int:
    """The heads that share a row, 0 where it is not said; leaves have their own widths."""
    heads = arguments.given_integer(given, "HEADS", 1, 1024)
    if heads and dim % heads and "LEAVES" not in given:
        raise CommandError(f"{where}: HEADS {heads} does not divide kv_dim {dim}")
    return heads


def _lives_here(context: Context, namespace: bytes, table: BlockTable | None) -> bool:
    """Claim a namespace; where another worker has it, its rows and its ``table`` go there.

    One that nobody has belongs where the rest of its lineage lives.
    """
    directory = context.server.directory
    owner = directory.claim(sides_of(namespace))
    nowhere = owner is not None and directory.home(sides_of(namespace)) is None
    if owner is not None and (nowhere or table is not None):
        raise CommandError(f"KV.PREFIX.REGISTER session lives on worker {owner}")
    return owner is None


def _missing(context: Context, creates: list[Create]) -> list[Record]:
    """The sessions that have to be created; refuses when a different one holds rows."""
    needed: list[Create] = []
    for record in creates:
        session = context.live(record.sid)
        if session is not None and same_schema(session, record):
            context.state.touch(session)
            continue
        if session is not None and not session.empty:
            raise CommandError(
                "KV.PREFIX.REGISTER namespace already exists with a different format"
            )
        needed.append(record)
    arriving = [record.sid for record in needed if record.sid not in context.state.sessions]
    evicted = context.store.space.evict_for_sessions(arriving)
    return [*evicted, *overdue(context, creates[0].sid), *needed]


@command(
    "KV.PREFIX.LOOKUP",
    -2,
    "HIT where both sides of a namespace exist, whatever rows they hold; credits the receipt.",
    syntax="ns [TOKENS tokens] [PREFILL_MS ms]",
    kvcache=True,
    keys=(1, 1),
    tenant=True,
)
def kv_prefix_lookup(context: Context, args: list[Arg]) -> Reply:
    namespace = arguments.sid(args[1])
    given = arguments.options(args[2:], {"TOKENS": 1, "PREFILL_MS": 1}, "KV.PREFIX.LOOKUP")
    prefill = arguments.given_integer(given, "PREFILL_MS", 0, MAX_PREFILL_MS)
    tokens = arguments.given_integer(given, "TOKENS", 0, 1 << 40) if "TOKENS" in given else -1
    sides = context.sides(namespace)
    directory, ledger = context.server.directory, context.server.ledger
    elsewhere = directory.elsewhere(namespace) if not sides else None
    if len(sides) < 2 and elsewhere is None:
        ledger.misses += 1
        return Simple("MISS")
    if elsewhere is not None:
        directory.touch(namespace)
    for session in sides:
        context.state.touch(session)
    if tokens < 0:
        first = sides[0].layers.get(0) if sides else None
        tokens = first.count if first else elsewhere or 0
    ledger.hit(tokens, prefill or directory.prefill_ms.get(namespace, 0))
    return Simple("HIT")


@command(
    "KV.PREFIX.DROP",
    -2,
    "Frees namespaces, rows and recurrent states; how many there were.",
    syntax="ns...",
    write=True,
    kvcache=True,
    home="namespace",
    keys=(1, -1),
    tenant=True,
)
def kv_prefix_drop(context: Context, args: list[Arg]) -> Effect:
    namespaces = list(dict.fromkeys(arguments.sid(arg) for arg in args[1:]))
    effects: list[Record] = []
    held = 0
    for namespace in namespaces:
        held += bool(context.sides(namespace))
        effects += drop_namespace(context.state, namespace, "dropped", int(time.time()))

    def dropped() -> int:
        # attention may have K/V of a name that was never registered, or was evicted
        context.server.attention.slots.forget(namespaces)
        return held

    return Effect(effects, dropped)


@command("KV.PREFIX.INFO", 1, "The V-store in numbers.", kvcache=True)
def kv_prefix_info(context: Context, args: list[Arg]) -> Reply:
    store, state = context.store, context.state
    published, sums = context.server.directory.count(), context.server.totals.sums()
    fields = {
        "registered_prefixes": sums.prefixes,
        "total_prefix_tokens": sums.prefix_tokens,
        "vstore_sessions": len(state.sessions),
        "vstore_max_sessions": store.config.max_sessions,
        "vstore_total_fetches": store.counters.fetches,
        "vstore_bytes": sums.row_bytes,
        "vstore_disk_bytes": store.space.disk_bytes(),
        "vstore_copied_bytes": store.counters.bytes_copied,
        "vstore_shared_bytes": store.counters.bytes_shared,
        "vstore_evictions": store.space.evictions,
        "vstore_damaged": store.counters.damaged,
        "wal_bytes": store.vstore_wal.size,
        "wal_appended": store.vstore_wal.appended,
        "wal_replayed": store.replayed.vstore,
        "ssm_wal_replayed": store.replayed.ssm,
        "directory_enabled": 1,
        "directory_entries": len(state.sessions) if published is None else published,
        **context.server.attention.fields(),
    }
    return "".join(f"{name}:{value}\r\n" for name, value in fields.items())


@command(
    "KV.PREFIX.SAVE",
    -1,
    "Writes the snapshots, and with a path in the data folder a portable copy too, over another "
    "one but no other file; then shortens the logs to what was logged meanwhile.",
    syntax="[path]",
    kvcache=True,
)
async def kv_prefix_save(context: Context, args: list[Arg]) -> Reply:
    if len(args) > 2:
        raise CommandError("wrong number of arguments for 'kv.prefix.save' command")
    store = context.store
    if store.saver.nothing_to_save():
        raise CommandError("KV.PREFIX.SAVE nothing to save")
    await store.save(_copy_path(context, arguments.word(args[1])) if len(args) == 2 else None)
    context.server.last_save = int(time.time())
    return OK


def _check_it_is_the_workers_own(context: Context, path: PurePosixPath) -> None:
    """One name for all workers would be one worker's copy, and look like everything."""
    config = context.server.config
    if config.workers > 1 and not path.name.endswith(f".w{config.worker}"):
        raise CommandError(
            f"KV.PREFIX.SAVE path: each of the {config.workers} workers copies what it holds: ask "
            f"every worker N, on port {context.server.port + 2} + N, for a path that ends in .wN; "
            f"this is worker {config.worker}"
        )


def _copy_path(context: Context, given: bytes) -> Path | None:
    """Where a portable copy goes; None: the manifest alone is written. Raises CommandError."""
    name = given.decode("utf-8", "surrogateescape")
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise CommandError("KV.PREFIX.SAVE path must be relative, without '..'")
    if any(len(os.fsencode(part)) > MAX_FILE_NAME_BYTES for part in path.parts):
        raise CommandError("KV.PREFIX.SAVE path is too long")
    target = context.server.config.folder / path
    if target == context.store.paths.vstore:
        return None
    _check_it_is_the_workers_own(context, path)
    if any(part.lower().startswith(("pion.", "pion-", ".metadata")) for part in path.parts):
        raise CommandError("KV.PREFIX.SAVE path names one of the server's own files")
    # unlike Path.is_dir, this answers for a path that is too long
    if not os.path.isdir(target.parent) or os.path.isdir(target):
        raise CommandError("KV.PREFIX.SAVE path must name a file in a folder that is there")
    try:
        replaceable = may_replace(target)
    except OSError as error:
        raise CommandError(f"KV.PREFIX.SAVE path: {error.strerror}") from error
    if not replaceable:
        raise CommandError(
            "KV.PREFIX.SAVE path names a file that is not a portable copy; it is not replaced"
        )
    return target


@command("KV.PREFIX.COMMIT", 1, "Brings everything acknowledged to stable storage.", kvcache=True)
async def kv_prefix_commit(context: Context, args: list[Arg]) -> Reply:
    if not context.store.config.wal:
        raise CommandError("KV.PREFIX.COMMIT needs the WAL (the server runs with --no-wal)")
    try:
        await context.store.flush()
        await context.server.keyspace.flush()
    except OSError as error:
        raise CommandError(f"KV.PREFIX.COMMIT failed: {error.strerror}") from error
    return OK


def _side(session: Session | None) -> dict[str, object]:
    if session is None:
        return {"present": False}
    counts = [rows.count for rows in session.layers.values()]
    return {
        "present": True,
        "format": session.fmt,
        "layers": len(counts),
        "rows_least": min(counts, default=0),
        "rows_most": max(counts, default=0),
        "verified": all(run.verified for run in session.runs()),
    }


def _never_here(context: Context) -> str:
    """Why nobody has a namespace; the admin is told where an earlier start may have had it."""
    config = context.server.config
    left = [] if context.client.tenant else left_behind(config.folder, config.workers)
    if not left:
        return "never registered here"
    return (
        f"never registered here; worker {', '.join(map(str, left))}, not running now, may hold it: "
        f"what those have is served by -w {left[-1] + 1} --independent-workers"
    )


@command(
    "KV.PREFIX.EXPLAIN",
    2,
    "Why a lookup hits or misses, as JSON.",
    syntax="ns",
    kvcache=True,
    keys=(1, 1),
    tenant=True,
    extension=True,
)
def kv_prefix_explain(context: Context, args: list[Arg]) -> Reply:
    namespace = arguments.sid(args[1])
    state = context.state
    keys = context.live(namespace + KEY_SUFFIX)
    values = context.live(namespace + VALUE_SUFFIX)
    reason, at = state.gone.get(namespace, ("", 0))
    overdue_now = context.overdue(namespace)
    if overdue_now:
        reason = "expired"
    elsewhere = context.server.directory.home(sides_of(namespace))
    if keys is not None and values is not None:
        verdict, why = "hit", "both sides are present"
    elif elsewhere is not None:
        here = context.server.directory.elsewhere(namespace) is not None
        verdict, why = "hit" if here else "miss", f"it lives on worker {elsewhere}"
    elif reason:
        verdict, why = "miss", reason
    elif keys is not None or values is not None:
        verdict, why = "miss", "one side is missing"
    else:
        verdict, why = "miss", _never_here(context)
    answer = {
        "namespace": context.shown(namespace).decode("utf-8", "backslashreplace"),
        "verdict": verdict,
        "reason": why,
        "since": at or None,
        "k": _side(keys),
        "v": _side(values),
        "states": [] if overdue_now else sorted(state.states.get(namespace, {})),
        "worker": context.server.ledger.worker_id,
    }
    return json.dumps(answer)
