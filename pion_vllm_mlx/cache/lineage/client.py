"""Commands of the store, and plain keys beside them, wherever the lineage lives.

A lineage lives on one worker of a server, keys and rows. Everything of it is sent where its
first segment's namespace is routed; KV.PREFIX.LONGEST, which any other worker refuses, says
if that was wrong.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.cache.lineage.presence import Presence
from pion_vllm_mlx.cache.lineage.types import LineageOptions
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.cache.store_client_endpoint import Endpoint, parse_url
from pion_vllm_mlx.config import ServerEnvironment
from pion_vllm_mlx.errors import CommandError, DeadlineExceeded, StillStarting, StoreUnavailable

_MOST_COMMANDS = 512
_POLL_SECONDS = 0.05
#: to wait for an embedded store before the first request: it may be on its way up, or read its log.
CONNECT_SECONDS = 15.0

Commands = Sequence[Sequence[Any]]
Decide = Callable[[Sequence[Any]], "Commands | None"]


class LineageClient(StoreClient):
    """A StoreClient that also knows keys. ``route`` is the namespace that says where."""

    def __init__(self, endpoint: Endpoint, deadline_seconds: float) -> None:
        super().__init__(endpoint, deadline_seconds)
        self._local = threading.local()
        self.presence = Presence()
        #: whether it was said that the server has no KV.PREFIX.LONGEST
        self.told_no_longest = False

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All commands of this thread inside end within ``seconds`` together."""
        self._local.ends_at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._local.ends_at = math.inf

    def open(self) -> None:
        """Finds the way to the server; starts an embedded one, which has time of its own.

        Raises StoreUnavailable.
        """
        self.endpoint.door.open()

    def reach(self, seconds: float) -> None:
        """Waits up to ``seconds`` for an embedded server that is on its way up.

        Raises StoreUnavailable: at once where nobody listens, after the usual deadline where
        a server takes the connection and is silent.
        """
        ends_at = time.monotonic() + seconds
        while True:
            try:
                self.open()
                self.endpoint.door.through(lambda connection: connection.command("PING"))
                return
            except StillStarting:
                if time.monotonic() >= ends_at:
                    raise
            while self.endpoint.door.paused() and time.monotonic() < ends_at:
                time.sleep(_POLL_SECONDS)

    def pipeline(self, route: str, commands: Commands, num_bytes: int = 0) -> list[Any]:
        """The replies of commands sent together, refusals among them.

        Raises StoreUnavailable. A refusal that sends elsewhere is followed.
        """
        found: list[Any] = []
        for first in range(0, len(commands), _MOST_COMMANDS):
            found += self._ask(route, commands[first : first + _MOST_COMMANDS], num_bytes)
        return found

    def demand(self, route: str, commands: Commands, num_bytes: int = 0) -> list[Any]:
        """As ``pipeline``; the first refusal is raised."""
        replies = self.pipeline(route, commands, num_bytes)
        for reply in replies:
            if isinstance(reply, CommandError):
                raise reply
        return replies

    def everywhere(self, commands: Commands) -> list[list[Any]]:
        """The replies of every worker of the server: what is of all models is kept on each.

        Raises StoreUnavailable, and the first refusal.
        """
        endpoint, count = self.endpoint, self.endpoint.workers()
        doors = [endpoint.door_of(n) for n in range(count)] if count > 1 else [endpoint.door]

        def call(connection: RespConnection) -> list[Any]:
            return connection.pipeline(commands, deadline_seconds=self.deadline_seconds)

        found = [door.through(call) for door in doors]
        for refusal in (one for replies in found for one in replies):
            if isinstance(refusal, CommandError):
                raise refusal
        return found

    def store_states_at(self, route: str, sid: str, blobs: Sequence[tuple[int, bytes, int]]) -> int:
        """Stores opaque blobs ``(layer, blob, crc)`` under a sid of a namespace; their size."""
        total = 0
        for layer, blob, crc in blobs:
            command = ("SSM.PREFIX.STORE", sid, layer, blob, "CRC", crc)
            self.demand(route, [command], len(blob))
            total += len(blob)
        return total

    def drop_states(self, route: str, sid: str) -> None:
        """Forgets all that lies under a sid."""
        self.demand(route, [("SSM.PREFIX.DROP", sid)])

    def _ask(self, route: str, commands: Commands, num_bytes: int) -> list[Any]:
        ends_at: float = self._local.__dict__.get("ends_at", math.inf)
        seconds = min(self.seconds(num_bytes), ends_at - time.monotonic())
        if seconds <= 0:
            raise DeadlineExceeded("the store answers too slowly")

        def call(connection: RespConnection) -> list[Any]:
            replies: list[Any] = connection.pipeline(commands, deadline_seconds=seconds)
            for reply in replies:
                if isinstance(reply, CommandError) and "lives on worker" in reply.sentence:
                    raise reply
            return replies

        return self.ask(route, call)

    def transaction(
        self, route: str, watched: Sequence[str], reads: Commands, decide: Decide
    ) -> list[Any] | None:
        """Carries out what ``decide`` makes of the replies to ``reads``, at one moment; or None.

        None where one of the keys changed meanwhile, where ``decide`` gives None, or where the
        connection broke: then nothing happened. Only one thread may have a transaction here.
        """
        before, _, *values = self.demand(route, [("CLIENT", "ID"), ("WATCH", *watched), *reads])
        commands = decide(values)
        if commands is None:
            self.pipeline(route, [("UNWATCH",)])
            return None
        now, *queued = self.pipeline(route, [("CLIENT", "ID"), ("MULTI",), *commands])
        refused = [reply for reply in queued if isinstance(reply, CommandError)]
        if now != before or refused:
            self.pipeline(route, [("DISCARD",)])
            if refused and now == before:
                raise refused[0]
            return None
        (reply,) = self.pipeline(route, [("EXEC",)])
        if reply is None or isinstance(reply, CommandError):
            return None
        return list(reply)


def connect(options: LineageOptions) -> LineageClient:
    """A client of the store that the options name; connects when it is first used."""
    place = parse_url(options.url)
    password = options.password or ServerEnvironment.from_environment().password
    endpoint = Endpoint(place, password, options.deadline_seconds, username=options.username)
    return LineageClient(endpoint, options.deadline_seconds)


def no_lineages(refusal: CommandError) -> StoreUnavailable:
    """The error for a server that keeps no lineages, or none for this user."""
    sentence = f"KV.PREFIX.LONGEST: {refusal.sentence}"
    if "required prefix" in sentence or "for tenant" in sentence:
        sentence += "; conversations need a server without --ns-prefix, and its default user"
    return StoreUnavailable(sentence)


def as_int(value: Any, otherwise: int = -1) -> int:
    """A reply as a number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return otherwise


def as_text(value: Any) -> str:
    """A reply as text, "" for nil."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)


def require_array(value: Any, what: str) -> list[Any]:
    """A reply that has to be an array. Raises StoreUnavailable."""
    if not isinstance(value, list):
        raise StoreUnavailable(f"the server does not answer {what}")
    return value


def pairs_of(reply: Any) -> list[tuple[Any, Any]]:
    """A reply of names and values as pairs, whatever RESP makes of it."""
    if isinstance(reply, dict):
        return list(reply.items())
    items = list(reply or ())
    if items and isinstance(items[0], list):
        return [(one[0], one[1]) for one in items]
    return list(zip(items[0::2], items[1::2], strict=True))
