"""MULTI, EXEC, DISCARD, WATCH: commands of one connection that take effect together."""

from __future__ import annotations

from dataclasses import replace

from pion_vllm_mlx.errors import CommandError, TransactionAborted
from pion_vllm_mlx.server.arguments import word
from pion_vllm_mlx.server.command import Effect, Reply
from pion_vllm_mlx.server.commands.keyspace_keys import OK
from pion_vllm_mlx.server.keyspace.changes import Change
from pion_vllm_mlx.server.keyspace.data import Overlay
from pion_vllm_mlx.server.keyspace_command import MAX_REPLY_BYTES, reads, reply_bytes, writes
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.transactions import Transaction
from pion_vllm_mlx.wire.resp import NULL_ARRAY, Arg


@reads("MULTI", 1, "Begins a transaction.", keys=None, at_once=True, tenant=True)
def multi(context: Context, args: list[Arg]) -> Reply:
    if context.client.transaction is not None:
        raise CommandError("MULTI calls can not be nested")
    context.client.transaction = Transaction()
    return OK


def end_transaction(context: Context) -> Transaction | None:
    """Forget what is queued and watched; what was queued."""
    client = context.client
    transaction, client.transaction = client.transaction, None
    context.server.keyspace.unwatch(client.watch)
    return transaction


@reads(
    "DISCARD", 1, "Ends a transaction without executing it.", keys=None, at_once=True, tenant=True
)
def discard(context: Context, args: list[Arg]) -> Reply:
    if context.client.transaction is None:
        raise CommandError("DISCARD without MULTI")
    end_transaction(context)
    return OK


@reads(
    "WATCH",
    -2,
    "EXEC refuses once one of the keys has changed.",
    syntax="key...",
    keys=(1, -1),
    at_once=True,
)
def watch(context: Context, args: list[Arg]) -> Reply:
    if context.client.transaction is not None:
        raise CommandError("WATCH inside MULTI is not allowed")
    context.server.keyspace.watch(context.client.watch, [word(arg) for arg in args[1:]])
    return OK


@reads("UNWATCH", 1, "Forgets what is watched.", keys=None, tenant=True)
def unwatch(context: Context, args: list[Arg]) -> Reply:
    context.server.keyspace.unwatch(context.client.watch)
    return OK


@writes(
    "EXEC",
    1,
    "Executes a transaction: all of it at one moment.",
    keys=None,
    at_once=True,
    tenant=True,
)
def exec_transaction(context: Context, args: list[Arg]) -> Effect:
    if context.client.transaction is None:
        raise CommandError("EXEC without MULTI")
    broken = context.server.keyspace.is_broken(context.client.watch)
    transaction = end_transaction(context)
    assert transaction is not None
    if transaction.broken:
        raise TransactionAborted("Transaction discarded because of previous errors.")
    if broken:
        return Effect([], NULL_ARRAY)
    if any(entry.grows for entry, _ in transaction.commands):
        context.server.memory_limit.check()
    # each command sees what those before it would change; nobody else does
    overlay = Overlay(context.server.keyspace.data, context.server.keyspace.now)
    inside = replace(context, overlay=overlay)
    changes: list[Change] = []
    replies: list[Reply] = []
    nbytes = 0
    for entry, words in transaction.commands:
        try:
            outcome = entry.handler(inside, words)
        except CommandError as error:
            outcome = error.with_traceback(None)
        if isinstance(outcome, Effect):
            mine = [one for one in outcome.records if isinstance(one, Change)]
            for one in mine:
                overlay.apply(one)
            changes += mine
            outcome = outcome.reply
        nbytes += reply_bytes(outcome)
        if nbytes > MAX_REPLY_BYTES:
            # before anything is applied: the transaction has done nothing
            raise TransactionAborted("Transaction discarded: its reply would be longer than 1 GiB")
        replies.append(outcome)
    return Effect(changes, replies)  # type: ignore[arg-type]
