"""Attention at the server, as a client asks for it: ATTEND.PREFIX.* and KV.PREFIX.WARM.

Letters: H_q query heads, H_kv stored heads, M query tokens, S suffix tokens, D head dimension;
all arrays are float32. Queries go over the binary lane where there is one, and over RESP
after its first failure. Every call ends by a deadline: that of the store client for
questions, ``WORK_SECONDS`` at least for what the server has to compute or to read, as long as it
answers a PING meanwhile.

Raises CommandError (ColdMiss for a slot that is known and not resident, see also
``is_missing``), and StoreUnavailable. Knows no mlx.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pion_vllm_mlx.cache.attend_lane import BinaryLane, Silence
from pion_vllm_mlx.cache.attend_request import (
    Floats,
    Query,
    Slot,
    Sparse,
    Whole,
    fused_body,
    fused_command,
    query_command,
    sparse_command,
)
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.errors import (
    ColdMiss,
    CommandError,
    OutOfMemory,
    PionError,
    StoreUnavailable,
)
from pion_vllm_mlx.wire.resp import Part

T = TypeVar("T")

log = logging.getLogger("pion_vllm_mlx")

WORK_SECONDS = 60.0
"""How long one attention, or the warming of a namespace, may keep the server busy."""

IN_PROCESS, BINARY, RESP = "in-process", "binary", "resp"

_FUSED = 0x24


def is_missing(error: CommandError) -> bool:
    """Whether a refusal says that the server has no such slot."""
    return type(error) is CommandError and error.sentence.startswith("session not found")


class AttendClient:
    """Queries to the slots of one server. Thread-safe.

    ``cold_misses`` counts answers that a slot was cold, ``queries`` those answered by lane,
    ``query_ms_total`` the time of all; ``in_process`` attentions that needed no server.
    """

    def __init__(self, client: StoreClient, password: str | None, *, no_binary: bool) -> None:
        self._client = client
        self._password = password
        self._lane: BinaryLane | None = None if no_binary else BinaryLane(client, password)
        self._patient: dict[Address, RespConnection] = {}
        self._lock = threading.Lock()
        #: after how long without a byte the server is asked whether it is still there
        self.silence_seconds = client.deadline_seconds
        self.cold_misses = 0
        self.query_ms_total = 0.0
        self.queries: Counter[str] = Counter()
        self.in_process = 0
        #: whether sparse queries that fail are told of in the log
        self.debug_sparse = False

    @property
    def lane(self) -> str:
        """How a fused query would travel now: ``binary`` or ``resp``. Asks the server once."""
        return BINARY if self._lane is not None and self._lane.usable() else RESP

    def attended(self) -> dict[str, int]:
        """How many attentions were computed, by lane."""
        found = dict(self.queries)
        return {IN_PROCESS: self.in_process, **found} if self.in_process else found

    def close(self) -> None:
        for connection in list(self._patient.values()):
            connection.close()
        if self._lane is not None:
            self._lane.close()

    # -- slots --------------------------------------------------------------------

    def store(self, slot: Slot, keys: Floats, values: Floats) -> None:
        """Makes K and V ``[H_kv, N, D]`` resident. Raises CommandError for another reply."""
        command = ["ATTEND.PREFIX.STORE", slot.sid, slot.layer, *keys.shape, keys, values]
        reply = self._work(slot.namespace, command, keys.nbytes + values.nbytes)
        if reply not in ("OK", b"OK"):
            raise CommandError(f"ATTEND.PREFIX.STORE answered {reply!r}")

    def state(self, slot: Slot) -> str:
        """HIT, COLD or MISS."""
        command: list[Part] = ["ATTEND.PREFIX.LOOKUP", slot.sid, slot.layer]
        return _text(self._client.ask(slot.namespace, lambda c: c.command(*command)))

    def states(self, namespace: str, sid: str, layers: int) -> list[str]:
        """HIT, COLD or MISS of the first so many layers, in one round trip."""
        return [_text(reply) for reply in self._looked_up(namespace, sid, layers)]

    def shapes(self, namespace: str, sid: str, layers: int) -> list[tuple[str, int, int, int]]:
        """The same with H_kv, N and D of each; 0 of one that is missing."""
        return [_shape(reply) for reply in self._looked_up(namespace, sid, layers, "SHAPE")]

    def shape(self, slot: Slot) -> tuple[str, int, int, int]:
        """HIT, COLD or MISS of one slot, with H_kv, N and D; 0 where it is missing."""
        command: list[Part] = ["ATTEND.PREFIX.LOOKUP", slot.sid, slot.layer, "SHAPE"]
        return _shape(self._client.ask(slot.namespace, lambda c: c.command(*command)))

    def has_record(self, namespace: str) -> bool:
        """Whether a whole prefix is stored under the namespace."""
        return self._client.record(namespace) is not None

    def _looked_up(self, namespace: str, sid: str, layers: int, *more: Part) -> list[Any]:
        commands: list[list[Part]] = [
            ["ATTEND.PREFIX.LOOKUP", sid, layer, *more] for layer in range(layers)
        ]
        replies = self._client.ask(namespace, lambda c: c.pipeline(commands))
        for reply in replies:
            if isinstance(reply, CommandError):
                raise reply
        return list(replies)

    def warm(self, slot: Slot, heads: int, dim: int, whole: Whole | None = None) -> int:
        """Makes one layer resident; 0 where it has no rows of ``heads`` times ``dim`` values.

        With ``whole`` raises CommandError where it is not all there, or of another record.
        Others of its model need not fit beside it, and may have other shapes.
        """
        command: list[Part] = ["LAYER", slot.layer]
        if whole is not None:
            command += whole.options
        return self._warmed(slot.namespace, slot.sid, (heads, dim), command)

    def warm_all(self, namespace: str, sid: str, heads: int, dim: int) -> int:
        """How many layers of ``heads`` times ``dim`` values were made resident under ``sid``.

        Raises OutOfMemory where the server cannot hold all of them.
        """
        return self._warmed(namespace, sid, (heads, dim), [])

    def _warmed(
        self, namespace: str, sid: str, shape: tuple[int, int], options: list[Part]
    ) -> int:
        reply = self._work(namespace, ["KV.PREFIX.WARM", namespace, *shape, sid, *options], 0)
        words = (reply.decode() if isinstance(reply, bytes) else str(reply)).split()
        return int(words[0]) if words and words[0].isdigit() else 0

    def rehydrated(self, slot: Slot, heads: int, dim: int, call: Callable[[], T]) -> T:
        """What ``call`` returns; for a cold slot once more, after its layer was warmed.

        Raises what ``call`` raises: the first ColdMiss where nothing could be warmed,
        OutOfMemory where the layer does not fit the server.
        """
        try:
            return call()
        except ColdMiss as cold:
            self.cold_misses += 1
            self.warm_again(slot, heads, dim, cold)
        return self.last_try(slot, call)

    def warm_again(
        self,
        slot: Slot,
        heads: int,
        dim: int,
        because: CommandError,
        whole: Whole | None = None,
    ) -> None:
        """Warms a slot, without ``whole`` from whatever rows its namespace has.

        Raises ``because`` where that fails, and OutOfMemory.
        """
        try:
            warmed = self.warm(slot, heads, dim, whole)
        except OutOfMemory:
            raise
        except CommandError as error:
            raise because from error
        if warmed <= 0:
            raise because

    def last_try(self, slot: Slot, call: Callable[[], T]) -> T:
        """What ``call`` returns. Raises ColdMiss, and says why, where it is cold again already."""
        try:
            return call()
        except ColdMiss as error:
            self.cold_misses += 1
            raise ColdMiss(
                f"layer {slot.layer} of {slot.sid} was pushed out again before it was asked: the "
                "server attends to more at once than its slots, or its --attend-budget, hold"
            ) from error

    # -- queries ------------------------------------------------------------------

    def prefix(self, slot: Slot, q: Floats, top_k: int = 1, window: int | None = None) -> Floats:
        """``q`` ``[H_kv, D]`` or ``[H_kv, M, D]`` over the prefix alone, in its shape."""
        batch = q if q.ndim == 3 else q[:, None]
        if batch.shape[1] == 1:
            command = query_command(slot, batch, top_k, window)
            (out,) = self._floats(slot, [command], [batch.size])
            return out.reshape(q.shape)
        return self.prefixes(slot, [(batch, window)], top_k)[0][0]

    def prefixes(
        self, slot: Slot, asked: Sequence[tuple[Floats, int | None]], top_k: int = 1
    ) -> list[tuple[Floats, Floats]]:
        """Queries ``[H_kv, M, D]`` with a window each, sent together: out, LSE ``[H_kv, M]``."""
        # A single query is answered without its LSE: it is asked twice.
        batches = [(q if q.shape[1] > 1 else np.repeat(q, 2, axis=1), w) for q, w in asked]
        commands = [query_command(slot, q, top_k, window) for q, window in batches]
        sizes = [q.size + q.shape[0] * q.shape[1] for q, _ in batches]
        replies = self._floats(slot, commands, sizes)
        found = []
        for reply, (q, _), (given, _) in zip(replies, batches, asked, strict=True):
            rows = given.shape[1]
            out, lse = reply[: q.size].reshape(q.shape), reply[q.size :].reshape(q.shape[:2])
            found.append((out[:, :rows], lse[:, :rows]))
        return found

    def fused(self, slot: Slot, query: Query) -> Floats:
        """One softmax over prefix and suffix, causal within it: ``[H_q, M, D]``."""
        started = time.perf_counter()
        lane = self._lane if self._lane is not None and self._lane.usable() else None
        if lane is not None:
            silence = Silence(self.silence_seconds, lambda: self._still_there(slot.namespace))
            body = lane.ask(_FUSED, fused_body(slot, query), query.num_bytes, silence)
            if body is not None:
                self._counted(BINARY, started)
                return _floats(body, query.q.size).reshape(query.q.shape)
        (out,) = self._floats(slot, [fused_command(slot, query)], [query.q.size])
        return out.reshape(query.q.shape)

    def sparse(self, slot: Slot, query: Query, chosen: Sparse) -> Floats:
        """``query.q`` ``[H_q, 1, D]`` over the best blocks, the tail, and the whole suffix."""
        (out,) = self._floats(slot, [sparse_command(slot, query, chosen)], [query.q.size])
        return out.reshape(query.q.shape)

    @contextlib.contextmanager
    def telling_sparse(self, slot: Slot) -> Iterator[None]:
        """Says, where that is wanted, what a sparse query over a slot fails with."""
        try:
            yield
        except PionError as error:
            if self.debug_sparse:
                log.warning(
                    "sparse attention over %s layer %s: %s", slot.namespace, slot.layer, error
                )
            raise

    # -- inside -------------------------------------------------------------------

    def _floats(
        self, slot: Slot, commands: Sequence[Sequence[Part]], sizes: Sequence[int]
    ) -> list[Floats]:
        started = time.perf_counter()
        num_bytes = 8 * sum(sizes)

        def ask(connection: RespConnection) -> list[Floats]:
            patient = self._patient_one(connection.address)
            replies = patient.pipeline(commands, deadline_seconds=self._seconds(num_bytes))
            for reply in replies:
                if isinstance(reply, CommandError):
                    raise reply
            return [_floats(reply, size) for reply, size in zip(replies, sizes, strict=True)]

        found = self._client.ask(slot.namespace, ask)
        self._counted(RESP, started)
        return found

    def _counted(self, lane: str, started: float) -> None:
        self.queries[lane] += 1
        self.query_ms_total += (time.perf_counter() - started) * 1000

    def _work(self, namespace: str, command: Sequence[Part], num_bytes: int) -> Any:
        def ask(connection: RespConnection) -> Any:
            patient = self._patient_one(connection.address)
            return patient.command(*command, deadline_seconds=self._seconds(num_bytes))

        return self._client.ask(namespace, ask)

    def _seconds(self, num_bytes: int) -> float:
        return max(self._client.seconds(num_bytes), WORK_SECONDS)

    def _patient_one(self, address: Address) -> RespConnection:
        """A connection that waits while the server computes; the store's own gives up sooner."""
        with self._lock:
            connection = self._patient.get(address)
            if connection is None:
                connection = self._client.endpoint.connect(
                    address,
                    silence_seconds=self.silence_seconds,
                    on_silence=lambda: self._answers(address),
                )
                self._patient[address] = connection
            return connection

    def _still_there(self, namespace: str) -> None:
        self._client.ask(namespace, lambda connection: self._answers(connection.address))

    def _answers(self, address: Address) -> None:
        """Raises StoreUnavailable for a server that does not answer a PING in time.

        One that computes does: its event loop waits for nothing.
        """
        with self._client.endpoint.connect(address) as asked:
            asked.command("PING")


def _text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _shape(reply: Any) -> tuple[str, int, int, int]:
    if not isinstance(reply, list) or len(reply) != 4:
        raise StoreUnavailable("ATTEND.PREFIX.LOOKUP answered something else than a shape")
    heads, tokens, dim = (int(number) for number in reply[1:])
    return _text(reply[0]), heads, tokens, dim


def _floats(reply: Any, size: int) -> Floats:
    if not isinstance(reply, bytes) or len(reply) != 4 * size:
        raise StoreUnavailable("ATTEND.PREFIX answered something else than rows")
    return np.frombuffer(reply, "<f4")
