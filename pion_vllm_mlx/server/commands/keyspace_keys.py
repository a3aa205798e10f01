"""Keys as such: existence, deadlines, names."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.keyspace.changes import Change, Verb, change
from pion_vllm_mlx.server.keyspace.data import Data, Entry
from pion_vllm_mlx.server.keyspace.glob import Matches, matcher
from pion_vllm_mlx.server.keyspace.values import kind_of
from pion_vllm_mlx.server.keyspace_command import (
    INT64,
    integer,
    keywords,
    reads,
    syntax_error,
    writes,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.turns import at_once, in_turns
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
#: keys that one step of SCAN looks at, at least: a small keyspace needs one step.
_SCAN_STEP = 1000
_MAX_SCAN_STEP = 1_000_000
#: names of fewer bytes are matched at once, others in turns.
_AT_ONCE_BYTES = 8 << 10
_CURSOR = re.compile(rb"[0-9]{1,20}")


def _delete(context: Context, args: list[Arg]) -> Effect:
    view = context.keys
    names = dict.fromkeys(word(arg) for arg in args[1:])
    there = [name for name in names if view.entry(name) is not None]
    return Effect([change(Verb.DELETE, *there)] if there else [], len(there))


@writes("DEL", -2, "Removes keys; how many there were.", syntax="key...", keys=(1, -1))
def delete(context: Context, args: list[Arg]) -> Effect:
    return _delete(context, args)


@writes("UNLINK", -2, "As DEL.", syntax="key...", keys=(1, -1))
def unlink(context: Context, args: list[Arg]) -> Effect:
    return _delete(context, args)


@reads("EXISTS", -2, "How many of the keys are there.", syntax="key...", keys=(1, -1))
def exists(context: Context, args: list[Arg]) -> Reply:
    view = context.keys
    return sum(1 for arg in args[1:] if view.entry(word(arg)) is not None)


@reads("TYPE", 2, "The kind of a key's value, or none.", syntax="key")
def type_of(context: Context, args: list[Arg]) -> Reply:
    entry = context.keys.entry(word(args[1]))
    return Simple("none" if entry is None else kind_of(entry.value))


@writes("RENAME", 3, "Gives a key another name.", syntax="key new_key", keys=(1, 2))
def rename(context: Context, args: list[Arg]) -> Effect:
    old, new = word(args[1]), word(args[2])
    if context.keys.entry(old) is None:
        raise CommandError("no such key")
    return Effect([change(Verb.RENAME, old, new)] if old != new else [], OK)


# -- deadlines -----------------------------------------------------------------


def deadline_after(now: int, amount: int, unit_ms: int, name: str) -> int:
    """Unix milliseconds, ``amount`` units after ``now``. Raises CommandError."""
    deadline = now + amount * unit_ms
    if amount * unit_ms not in INT64 or deadline not in INT64:
        raise CommandError(f"invalid expire time in '{name}' command")
    return deadline


def deadline_changes(key: bytes, deadline: int, now: int) -> list[Change]:
    """The key ends then; a deadline that is over ends it at once."""
    if deadline <= now:
        return [change(Verb.DELETE, key)]
    return [change(Verb.DEADLINE, key, b"%d" % deadline)]


def _allowed(options: set[bytes], current: int, deadline: int) -> bool:
    """Whether EXPIRE's options allow to replace the current deadline (0: none)."""
    if b"NX" in options and current:
        return False
    if b"XX" in options and not current:
        return False
    if b"GT" in options and (not current or deadline <= current):
        return False
    return not (b"LT" in options and current and deadline >= current)


def _expire(context: Context, args: list[Arg], unit_ms: int, name: str) -> Effect:
    view = context.keys
    key = word(args[1])
    amount = integer(args[2])
    options = set(keywords(args[3:]))
    if unknown := options - {b"NX", b"XX", b"GT", b"LT"}:
        shown = sorted(unknown)[0][:64].decode("utf-8", "replace")
        raise CommandError(f"Unsupported option {shown}")
    if b"NX" in options and len(options) > 1:
        raise CommandError("NX and XX, GT or LT options at the same time are not compatible")
    if {b"GT", b"LT"} <= options:
        raise CommandError("GT and LT options at the same time are not compatible")
    deadline = deadline_after(view.now, amount, unit_ms, name)
    entry = view.entry(key)
    if entry is None or not _allowed(options, entry.deadline, deadline):
        return Effect([], 0)
    return Effect(deadline_changes(key, deadline, view.now), 1)


@writes("EXPIRE", -3, "Ends a key after so many seconds.", syntax="key seconds [NX|XX] [GT|LT]")
def expire(context: Context, args: list[Arg]) -> Effect:
    return _expire(context, args, 1000, "expire")


@writes(
    "PEXPIRE",
    -3,
    "Ends a key after so many milliseconds.",
    syntax="key milliseconds [NX|XX] [GT|LT]",
)
def pexpire(context: Context, args: list[Arg]) -> Effect:
    return _expire(context, args, 1, "pexpire")


@writes("PERSIST", 2, "Takes a key's deadline away.", syntax="key")
def persist(context: Context, args: list[Arg]) -> Effect:
    key = word(args[1])
    entry = context.keys.entry(key)
    if entry is None or not entry.deadline:
        return Effect([], 0)
    return Effect([change(Verb.DEADLINE, key, b"0")], 1)


def _left_ms(context: Context, key: bytes) -> int:
    """Milliseconds left; −1 without a deadline, −2 without the key."""
    view = context.keys
    entry = view.entry(key)
    if entry is None:
        return -2
    return entry.deadline - view.now if entry.deadline else -1


@reads("TTL", 2, "Seconds until a key ends; -1: never, -2: no such key.", syntax="key")
def ttl(context: Context, args: list[Arg]) -> Reply:
    left = _left_ms(context, word(args[1]))
    return left if left < 0 else (left + 500) // 1000


@reads("PTTL", 2, "Milliseconds until a key ends; -1: never, -2: no such key.", syntax="key")
def pttl(context: Context, args: list[Arg]) -> Reply:
    return _left_ms(context, word(args[1]))


# -- all keys ------------------------------------------------------------------


def _listed(
    context: Context,
    parts: Iterable[list[bytes]],
    wanted: Callable[[bytes, Entry], bool],
    reply: Callable[[list[bytes]], Reply] = lambda found: found,
) -> Reply | Awaitable[Reply]:
    """A reply of the names that are wanted, as this connection knows them.

    A tenant knows its own. Where there are many, others have their turns meanwhile; what is
    there all the while is listed. A transaction is of one moment: there nobody has a turn.
    """
    view, mine = context.keys, context.stored(b"")
    found: list[bytes] = []

    def look(stored: bytes) -> None:
        if stored.startswith(mine):
            entry, name = view.entry(stored), stored[len(mine) :]
            if entry is not None and wanted(name, entry):
                found.append(name)

    async def listed() -> Reply:
        await in_turns(parts, look)
        return reply(found)

    if context.overlay is None and not _is_small(view.data):
        return listed()
    at_once(parts, look)
    return reply(found)


def _is_small(data: Data) -> bool:
    """Whether looking at all names takes no time."""
    return len(data.entries) <= _SCAN_STEP and sum(map(len, data.entries)) < _AT_ONCE_BYTES


@reads("KEYS", 2, "The keys that match a pattern.", syntax="pattern", keys=None, tenant=True)
def keys(context: Context, args: list[Arg]) -> Reply | Awaitable[Reply]:
    pattern, data = word(args[1]), context.keys.data
    matches: Matches = matcher(pattern) if pattern != b"*" else _anything
    return _listed(context, data.parts(0, data.last_place), lambda name, entry: matches(name))


def _anything(name: bytes) -> bool:
    return True


@reads(
    "SCAN",
    -2,
    "A part of the keys, and the cursor of the next part.",
    syntax="cursor [MATCH pattern] [COUNT count] [TYPE type]",
    keys=None,
    tenant=True,
)
def scan(context: Context, args: list[Arg]) -> Reply | Awaitable[Reply]:
    cursor_text = word(args[1])
    if not _CURSOR.fullmatch(cursor_text) or int(cursor_text) >= 1 << 64:
        raise CommandError("invalid cursor")
    pattern, count, kind = b"*", _SCAN_STEP, ""
    if len(args) % 2:
        raise syntax_error()
    for name, given in zip(keywords(args[2::2]), args[3::2], strict=True):
        match name:
            case b"MATCH":
                pattern = word(given)
            case b"COUNT":
                count = integer(given)
            case b"TYPE":
                kind = word(given).decode("latin-1").lower()
            case _:
                raise syntax_error()
    if count < 1:
        raise syntax_error()
    matches = matcher(pattern)

    def wanted(name: bytes, entry: Entry) -> bool:
        return matches(name) and kind in ("", kind_of(entry.value))

    parts, following = _step(context, int(cursor_text), min(max(count, _SCAN_STEP), _MAX_SCAN_STEP))
    return _listed(context, parts, wanted, lambda found: [b"%d" % following, found])


def _step(context: Context, cursor: int, count: int) -> tuple[Iterable[list[bytes]], int]:
    """The keys of one step of SCAN, and the next cursor, 0 at the end.

    Cursors count the keys of everybody, so a tenant gets all of its own at once.
    """
    data = context.keys.data
    if context.client.tenant:
        return [] if cursor else data.parts(0, data.last_place), 0
    last, following = data.step(cursor, count)
    return data.parts(cursor, last), following


@reads("DBSIZE", 1, "Number of keys.", keys=None)
def dbsize(context: Context, args: list[Arg]) -> Reply:
    view = context.keys
    return view.data.size(view.now)


def _flush(args: list[Arg]) -> Effect:
    if len(args) > 2:
        raise syntax_error()
    if keywords(args[1:]) not in ([], [b"ASYNC"], [b"SYNC"]):
        raise syntax_error()
    return Effect([change(Verb.FLUSH)], OK)


@writes("FLUSHALL", -1, "Removes every key; prefixes stay.", syntax="[ASYNC|SYNC]", keys=None)
def flushall(context: Context, args: list[Arg]) -> Effect:
    return _flush(args)


@writes("FLUSHDB", -1, "Removes every key; prefixes stay.", syntax="[ASYNC|SYNC]", keys=None)
def flushdb(context: Context, args: list[Arg]) -> Effect:
    return _flush(args)
