"""Declaring commands: the decorator, the table it fills, and what handlers return.

A *read* handler answers from the state. A *write* handler changes nothing: it
checks and returns the records of its effect and the reply; dispatch logs the
records, applies them, then answers. A write whose bytes have to reach the disk
first names a ``prepare`` coroutine: it runs outside the write lock and its result
is the handler's third argument.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from pion_vllm_mlx.server.outbound import Stream
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.wire.resp import Arg, BulkTarget, Value

if TYPE_CHECKING:
    from pion_vllm_mlx.server.session import Context
    from pion_vllm_mlx.server.store.store import Store

Reply: TypeAlias = "Value | Stream"


class Effect(NamedTuple):
    """What a write does: records to log and apply, then the reply.

    A reply that only the applied state knows is a function without arguments.
    """

    records: Sequence[Record]
    reply: Reply | Callable[[], Reply]


class Prepared(Protocol):
    """What a ``prepare`` has put on the disk for its handler."""

    def finish(self, store: Store, applied: bool) -> None:
        """The command is over: its record is applied, or nothing came of it."""


OpenBulk: TypeAlias = "Callable[[Context, list[Arg], int], BulkTarget]"


@dataclass(frozen=True)
class Command:
    """One entry of the command table.

    ``arity`` counts the name; negative means at least that many. ``keys`` says which
    arguments are namespaces or sessions (first, last, −1 = to the end), for guards;
    with ``any_prefix`` they are not held against --ns-prefix. ``long_arguments``: an
    argument may be long, lives in memory, and is read with ``arguments.data``.
    ``keyspace``: works on plain keys, one in ``key_step`` arguments; what it writes goes
    to their log. ``at_once``: is not queued by MULTI. ``tenant``: a tenant may use it, on its
    own keys; everything else is refused to tenants.
    ``home``: it is refused where its names live on another worker, and the refusal begins
    with the command's name or, for one on a "session", does not.
    ``syntax``: the words behind the name, as ``command_syntax`` reads them. ``extensions``: those
    of its words that are no part of the protocol that other servers speak.
    """

    name: str
    arity: int
    summary: str
    handler: Callable[..., Any]
    write: bool = False
    kvcache: bool = False
    no_auth: bool = False
    keys: tuple[int, int] | None = None
    extension: bool = False
    since: str = "0.1.0"
    grows: bool = False
    prepare: Callable[[Context, list[Arg]], Awaitable[Prepared]] | None = None
    open_bulk: OpenBulk | None = None
    long_arguments: bool = False
    any_prefix: bool = False
    keyspace: bool = False
    key_step: int = 1
    at_once: bool = False
    tenant: bool = False
    home: str = ""
    syntax: str = ""
    extensions: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        if self.keyspace:
            return "keyspace"
        return self.name.rpartition(".")[0] or "connection"

    def accepts(self, count: int) -> bool:
        """Whether a command of ``count`` words, the name included, has the right arity."""
        return count == self.arity if self.arity >= 0 else count >= -self.arity


TABLE: dict[bytes, Command] = {}


def command(
    name: str, arity: int, summary: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated handler into the table; options are the fields of ``Command``."""

    def enter(handler: Callable[..., Any]) -> Callable[..., Any]:
        TABLE[name.encode()] = Command(name, arity, summary, handler, **options)
        return handler

    return enter
