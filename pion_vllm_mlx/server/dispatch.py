"""The one path of a command: table, guards, handler, log, apply, answer."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable

from pion_vllm_mlx.errors import AuthenticationRequired, CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import TABLE, Command, Effect, Reply
from pion_vllm_mlx.server.directory import sides_of, together
from pion_vllm_mlx.server.inbound import DeferredBulk, MemoryInbound, StreamInbound
from pion_vllm_mlx.server.long_arguments import LongInbound
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.server.tenants import check_allowed, own_arguments
from pion_vllm_mlx.wire.resp import Arg, BulkTarget

log = logging.getLogger(__name__)

#: the long arguments of a command that takes none are kept up to here.
PLAIN_ARGUMENT_BYTES = 1 << 20
_SHOWN_ARGUMENTS = 8

_NOT_ENABLED = {
    "KV": "V-store not enabled (use --kvcache)",
    "V": "V-store not enabled (use --kvcache)",
    "ATTEND": "attention index not enabled (use --kvcache)",
    "STATE": "state cache not enabled (use --kvcache)",
}


def find(context: Context, args: list[Arg]) -> Command:
    """The command of a request. Raises CommandError when unknown, of wrong arity or not allowed."""
    name = args[0] if isinstance(args[0], bytes) else b""
    command = TABLE.get(name.upper())
    _check_access(context, command, name, len(args))
    if command is None:
        raise _unknown(name, args[1:])
    if not command.accepts(len(args)):
        raise CommandError(f"wrong number of arguments for '{command.name.lower()}' command")
    return command


def _unknown(name: bytes, rest: list[Arg]) -> CommandError:
    shown = " ".join(
        f"'{arg[:128].decode('utf-8', 'replace')}'"
        for arg in rest[:_SHOWN_ARGUMENTS]
        if isinstance(arg, bytes)
    )
    text = name[:128].decode("utf-8", "replace")
    return CommandError(f"unknown command '{text}', with args beginning with: {shown}")


def _check_access(context: Context, command: Command | None, name: bytes, count: int) -> None:
    """Whether this connection may use the command, be there one or not."""
    if command is not None and command.no_auth:
        return
    client = context.client
    if context.server.config.password and not client.authenticated:
        raise AuthenticationRequired("Authentication required.")
    if client.tenant:
        check_allowed(client.tenant, command, name, count)


def guard(command: Command, context: Context, args: list[Arg]) -> list[Arg]:
    """The --kvcache switch, the namespace prefix, the memory limit.

    Returns the arguments for the handler: those of a tenant name what is its own.
    """
    config = context.server.config
    if command.kvcache and not config.kvcache:
        raise CommandError(_NOT_ENABLED[command.name.partition(".")[0]])
    if command.grows:
        context.server.memory_limit.check()
    if config.ns_prefix and command.keys is not None and not command.any_prefix:
        _check_prefix(command.keys, config.ns_prefix, args)
    args = own_arguments(context.client.tenant, command, args) if context.client.tenant else args
    return _at_home(command, context, args) if command.home else args


def _at_home(command: Command, context: Context, args: list[Arg]) -> list[Arg]:
    """The arguments, unless another worker has what they name. Raises CommandError."""
    assert command.keys is not None
    first, last = command.keys
    for key in args[first : len(args) if last < 0 else last + 1]:
        sids = () if not isinstance(key, bytes) else _sessions_of(command, key)
        owner = context.server.directory.home(sids)
        if owner is not None:
            raise CommandError(lives_on(command, owner) + _named(command, context, key))
    return args


def _sessions_of(command: Command, key: bytes) -> tuple[bytes, ...]:
    return together(key) if command.home == "session" else sides_of(key)


def _named(command: Command, context: Context, key: Arg) -> str:
    """Which of several names it is."""
    if command.home != "namespace" or command.keys == (1, 1) or not isinstance(key, bytes):
        return ""
    return f": {context.shown(key).decode('utf-8', 'backslashreplace')}"


def lives_on(command: Command, owner: int) -> str:
    """The sentence from which clients learn where to go."""
    where = "" if command.home == "session" else f"{command.name} "
    return f"{where}session lives on worker {owner}"


def _check_prefix(keys: tuple[int, int], required: bytes, args: list[Arg]) -> None:
    first, last = keys
    end = len(args) if last < 0 else last + 1
    arguments.check_prefix(args[first:end], required)


def open_bulk(context: Context, args: list[Arg], length: int) -> BulkTarget:
    """Where a long argument of the command being received goes.

    Raises CommandError for what cannot be used, as far as is known by now.
    """
    name = args[0] if args and isinstance(args[0], bytes) else b""
    command = TABLE.get(name.upper())
    # the argument that begins here is a word, too
    _check_access(context, command, name, len(args) + 1)
    if command is None:
        raise CommandError("unknown command")
    args = guard(command, context, args)
    if command.open_bulk is not None:
        return command.open_bulk(context, args, length)
    if command.long_arguments:
        return context.server.long_arguments.open(length, context.when_room)
    held = sum(arg.length for arg in args if not isinstance(arg, bytes))
    if held + length > PLAIN_ARGUMENT_BYTES:
        # more could fill the pool of windows with one command, which then waits for itself
        raise CommandError("arguments are too long")
    return MemoryInbound(length, context.server.pool, context.when_room)


def execute(context: Context, args: list[Arg]) -> Reply | Awaitable[Reply]:
    """Run one command; a refusal raises CommandError, here or when awaited."""
    transaction = context.client.transaction
    try:
        command = find(context, args)
        args = guard(command, context, args)
        context.client.last_command = command.name.lower()
        context.client.active = time.monotonic()
        if transaction is not None and not command.at_once:
            return transaction.queue(command, args)
    except CommandError:
        if transaction is not None:
            transaction.broken = True
        raise
    if command.write:
        return _write(command, context, args)
    result: Reply | Awaitable[Reply] = command.handler(context, _plain(command, args))
    return result


def _plain(command: Command, args: list[Arg]) -> list[Arg]:
    """Long arguments of commands that take none, as plain bytes."""
    if command.open_bulk is not None:
        return args
    return [bytes(arg.view) if isinstance(arg, MemoryInbound) else arg for arg in args]


async def _write(command: Command, context: Context, args: list[Arg]) -> Reply:
    """Prepare outside the lock; check, log and apply inside it; then answer."""
    plain = _plain(command, args)
    await _make_room_for_keys(command, context, plain)
    prepared = None if command.prepare is None else await command.prepare(context, plain)
    handed = (context, plain) if prepared is None else (context, plain, prepared)
    outcome: list[Effect] = []

    def build() -> list[Record]:
        effect: Effect = command.handler(*handed)
        outcome.append(effect)
        tenant, shares = context.client.tenant, context.server.shares
        if shares is None or not tenant:
            return list(effect.records)
        return shares.fitted(tenant, effect.records)

    applied = False
    try:
        owner = context.server.keyspace if command.keyspace else context.store
        await owner.commit(build)
        applied = True
    finally:
        if prepared is not None:
            prepared.finish(context.store, applied)
    reply = outcome[0].reply
    return reply() if callable(reply) else reply


async def _make_room_for_keys(command: Command, context: Context, args: list[Arg]) -> None:
    """Plain keys count against the disk budget. Raises CommandError where they do not fit."""
    if not command.keyspace:
        return
    transaction, nbytes = context.client.transaction, 0
    if command.grows:
        nbytes = sum(len(arg) if isinstance(arg, bytes) else arg.length for arg in args)
    elif transaction is not None:
        nbytes = transaction.growth()
    if not nbytes:
        return
    try:
        await context.store.make_little_room(nbytes)
    except CommandError:
        if transaction is not None:
            context.client.transaction = None
            context.server.keyspace.unwatch(context.client.watch)
        raise


def release(args: list[Arg]) -> None:
    """Give back what a command's long arguments hold."""
    for arg in opened(args):
        if isinstance(arg, (MemoryInbound, StreamInbound, LongInbound)):
            arg.release()


def opened(args: list[Arg]) -> list[Arg]:
    """The arguments with deferred ones replaced by what they became."""
    return [arg.target or arg if isinstance(arg, DeferredBulk) else arg for arg in args]


def is_pending(result: Reply | Awaitable[Reply]) -> bool:
    """Whether a result has to be awaited."""
    return inspect.iscoroutine(result)
