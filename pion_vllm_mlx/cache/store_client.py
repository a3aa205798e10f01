"""What the prompt cache asks of the server, in the words of its own task.

Every call ends by a deadline and raises StoreUnavailable when the server is absent,
slow, or something else. A command that the server refuses raises its CommandError.
Where the server has several workers, a call goes to the one that has its namespace.
Knows namespaces and bytes; knows no model.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, Run
from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.cache.store_client_endpoint import Endpoint, nobody_listens
from pion_vllm_mlx.cache.store_client_notes import HitNotes
from pion_vllm_mlx.cache.store_client_routes import Routes, named_worker
from pion_vllm_mlx.errors import CommandError, DamagedData, StoreUnavailable

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.leaf import LeafSpec

SLOWEST_BYTES_PER_SECOND = 32 << 20
"""A transfer slower than this counts as no progress, beyond the deadline itself."""

PIPELINE_BYTES = 64 << 20

MAX_NAMESPACE_BYTES = 65_532
"""The server has no longer ones: the ids of their sessions are three bytes longer."""

T = TypeVar("T")

_LONGEST_PREFILL_MS = 86_400_000


@dataclass(frozen=True)
class Probe:
    """What the server has under a namespace; ``mapping`` is None where it cannot be mapped."""

    present: bool
    record: bytes | None
    mapping: dict[str, Any] | None


@dataclass(frozen=True)
class Registration:
    """The arguments of KV.PREFIX.REGISTER."""

    kv_dim: int
    vquant: str
    heads: int
    leaves: str | None
    prefill_ms: int

    @classmethod
    def of(cls, leaves: Sequence[LeafSpec], prefill_ms: float = 0.0) -> Registration:
        """Sessions for these leaves; without any, those of recurrent layers, which stay empty."""
        milliseconds = min(round(prefill_ms), _LONGEST_PREFILL_MS)
        if not leaves:
            return cls(1, "fp16", 1, None, milliseconds)
        from pion_vllm_mlx.cache.leaf import leaves_json  # needs mlx, and who has leaves has it

        first = leaves[0]
        return cls(
            kv_dim=first.k_width or first.v_width or 1,
            vquant="fp16" if first.format.startswith("raw:") else first.format,
            heads=first.heads,
            leaves=leaves_json(leaves),
            prefill_ms=milliseconds,
        )


class _WorkerGone(StoreUnavailable):
    """Nobody listens where a worker was: the server was started again with fewer."""


class StoreClient:
    """Commands of one store. Thread-safe as its connection is."""

    def __init__(self, endpoint: Endpoint, deadline_seconds: float) -> None:
        self.endpoint = endpoint
        self.deadline_seconds = deadline_seconds
        self._routes = Routes(endpoint)
        self._notes = HitNotes(endpoint.connect)

    def probe(self, namespace: str, tokens: int, *, mapped: bool) -> Probe:
        """Existence, completion record and, if wanted, the files: one round trip."""
        commands: list[Sequence[Any]] = [
            ("KV.PREFIX.LOOKUP", namespace, "TOKENS", tokens),
            ("SSM.PREFIX.FETCH", namespace, COMPLETION_LAYER),
        ]
        if mapped and self.endpoint.local:
            commands.append(("KV.PREFIX.MAP", namespace))

        def ask(connection: RespConnection) -> Probe:
            replies = connection.pipeline(commands, deadline_seconds=self.deadline_seconds)
            found, record = _checked(replies[0]), _checked(replies[1])
            if found not in ("HIT", "MISS", b"HIT", b"MISS"):
                raise StoreUnavailable("the server does not answer KV.PREFIX.LOOKUP")
            if record is not None and not isinstance(record, bytes):
                raise StoreUnavailable("the server does not answer SSM.PREFIX.FETCH")
            mapping = mapping_of(replies[2]) if len(replies) > 2 else None
            return Probe(found in ("HIT", b"HIT"), record, mapping)

        found = self.ask(namespace, ask)
        # states are known to their own worker alone
        if found.present and found.record is None and self._routes.moved(namespace):
            return self.ask(namespace, ask)
        return found

    def note_hit(self, namespace: str, tokens: int) -> None:
        """Lets the server know of a hit that it had no part in; waits for nothing."""
        address = self.endpoint.address()
        size = len(namespace.encode("utf-8", "replace"))
        if address is not None and size <= MAX_NAMESPACE_BYTES:
            self._notes.note(address, namespace, tokens)

    def look_up(self, namespace: str) -> bool:
        """Whether both sides of the namespace exist."""
        reply = self.ask(namespace, lambda c: c.command("KV.PREFIX.LOOKUP", namespace))
        return reply in ("HIT", b"HIT")

    def record(self, namespace: str) -> bytes | None:
        """The completion record, without touching the value receipt."""
        reply = self.ask(
            namespace, lambda c: c.command("SSM.PREFIX.FETCH", namespace, COMPLETION_LAYER)
        )
        return reply if isinstance(reply, bytes) else None

    def explain(self, namespace: str) -> str:
        """The server's reason why a lookup hits or misses, one sentence."""
        reply = self.ask(namespace, lambda c: c.command("KV.PREFIX.EXPLAIN", namespace))
        try:
            return str(json.loads(reply)["reason"]) if isinstance(reply, bytes) else ""
        except (ValueError, KeyError, TypeError):
            return ""

    def drop(self, namespace: str) -> None:
        """Frees rows, states and record."""
        self.ask(namespace, lambda c: c.command("KV.PREFIX.DROP", namespace))

    def register(self, namespace: str, what: Registration) -> None:
        """Creates both sessions."""
        command: list[Any] = ["KV.PREFIX.REGISTER", namespace, what.kv_dim, what.vquant]
        command += ["HEADS", what.heads]
        if what.leaves is not None:
            command += ["LEAVES", what.leaves]
        if what.prefill_ms > 0:
            command += ["PREFILL_MS", what.prefill_ms]
        self.ask(namespace, lambda c: c.command(*command))

    def create(self, namespace: str, schemas: dict[str, list[str]]) -> None:
        """Creates both sessions by V.CREATE, one spec of its SCHEMA a layer and side."""
        commands = [
            ["V.CREATE", f"{namespace}_p{side}", 0, "SCHEMA", len(specs), *specs]
            for side, specs in schemas.items()
        ]
        self._send(namespace, commands, 0)

    def store_rows(self, namespace: str, blobs: Iterable[tuple[Run, Any]]) -> int:
        """Sends runs and their bytes, pipelined; returns how many bytes were stored."""
        total = 0
        for group in _grouped(blobs, _run_size):
            commands = []
            for run, blob in group:
                command = ["V.STOREBATCH", _session(namespace, run), run.layer, run.start]
                command += [run.rows, blob, "FMT", "STORED"]
                command += ["LAYOUT", "HND"] if run.layout == "HND" else []
                commands.append([*command, "CRC", run.crc])
            total += self._send(namespace, commands, sum(_size(blob) for _, blob in group))
        return total

    def store_states(self, namespace: str, blobs: Sequence[tuple[int, bytes, int]]) -> int:
        """Stores opaque blobs ``(layer, blob, crc)``, pipelined; returns their size."""
        total = 0
        for group in _grouped(blobs, _blob_size):
            commands = [
                ["SSM.PREFIX.STORE", namespace, layer, blob, "CRC", crc]
                for layer, blob, crc in group
            ]
            total += self._send(namespace, commands, sum(map(_blob_size, group)))
        return total

    def publish(self, namespace: str) -> None:
        """Has the server seal the files, so that the next process can map them.

        One that refuses, or does not know how, has stored the prefix all the same.
        """
        if self.endpoint.local:
            with contextlib.suppress(CommandError):
                self.ask(namespace, lambda c: c.command("KV.PREFIX.MAP", namespace))

    def export(self, namespace: str, end: int, layers: int, heads: int, dim: int) -> str:
        """Path of a file with rows ``[0, end)`` of both sides, as stored."""
        command: list[Any] = ["V.EXPORT", f"{namespace}_pk", f"{namespace}_pv"]
        command += [0, end, layers, heads, dim, "FMT", "STORED"]
        reply = self.ask(namespace, lambda c: c.command(*command))
        if not isinstance(reply, bytes):
            raise StoreUnavailable("V.EXPORT answered something else than a path")
        return reply.decode("utf-8", "surrogateescape")

    def fetch_batch(
        self, namespace: str, side: str, end: int, num_layers: int, expected_bytes: int
    ) -> list[NDArray[np.uint8] | None]:
        """Rows ``[0, end)`` of all layers of one side, head-major, as stored."""
        command = ["V.FETCH", f"{namespace}_p{side}", "BATCH", 0, end, num_layers]
        command += ["FMT", "STORED", "LAYOUT", "HND"]
        return self._fetch(namespace, command, expected_bytes)

    def fetch_range(
        self, namespace: str, run: Run, expected_bytes: int
    ) -> NDArray[np.uint8] | None:
        """The rows of one run, in the layout in which they were stored."""
        (rows,) = self._fetch(namespace, _range_command(namespace, run), expected_bytes)
        return rows

    def fetch_ranges(
        self, namespace: str, runs: Sequence[Run], expected_bytes: int
    ) -> list[NDArray[np.uint8] | None]:
        """The rows of several runs in one round trip, for layers that differ in theirs."""
        commands = [_range_command(namespace, run) for run in runs]
        rows = self._fetch_blobs(namespace, commands, expected_bytes)
        return [None if row is None else np.frombuffer(row, np.uint8) for row in rows]

    def fetch_states(
        self, namespace: str, slots: Sequence[int], expected_bytes: int
    ) -> list[bytes | None]:
        """The blobs of recurrent slots, in one round trip."""
        commands = [("SSM.PREFIX.FETCH", namespace, slot) for slot in slots]
        return self._fetch_blobs(namespace, commands, expected_bytes)

    def seconds(self, num_bytes: int) -> float:
        """How long a call that moves ``num_bytes`` may take."""
        return self.deadline_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND

    def ask(self, namespace: str, call: Callable[[RespConnection], T]) -> T:
        """What ``call`` returns where the namespace is; once more if that turns out elsewhere.

        Raises StoreUnavailable, and what ``call`` raises.
        """
        if len(namespace.encode("utf-8", "surrogateescape")) > MAX_NAMESPACE_BYTES:
            raise CommandError(f"a namespace has at most {MAX_NAMESPACE_BYTES:,} bytes")
        try:
            return self._once(namespace, call)
        except CommandError as error:
            if not self._routes.redirect(namespace, error):
                raise
        except _WorkerGone:
            pass
        return self._once(namespace, call)

    def close(self) -> None:
        self._notes.close()
        self.endpoint.close()

    # -- inside ---------------------------------------------------------------

    def _fetch(
        self, namespace: str, command: Sequence[Any], num_bytes: int
    ) -> list[NDArray[np.uint8] | None]:
        seconds = self.seconds(num_bytes)
        return self.ask(namespace, lambda c: c.fetch_into(command, deadline_seconds=seconds))

    def _fetch_blobs(
        self, namespace: str, commands: Sequence[Sequence[Any]], num_bytes: int
    ) -> list[bytes | None]:
        blobs = self._replies(namespace, commands, num_bytes)
        if not all(blob is None or isinstance(blob, bytes) for blob in blobs):
            raise StoreUnavailable(f"the server does not answer {commands[0][0]}")
        return blobs

    def _send(self, namespace: str, commands: Sequence[Sequence[Any]], num_bytes: int) -> int:
        self._replies(namespace, commands, num_bytes)
        return num_bytes

    def _replies(
        self, namespace: str, commands: Sequence[Sequence[Any]], num_bytes: int
    ) -> list[Any]:
        """The replies of commands sent together. Raises the first refusal."""
        seconds = self.seconds(num_bytes)

        def ask(connection: RespConnection) -> list[Any]:
            replies = connection.pipeline(commands, deadline_seconds=seconds)
            return [_checked(reply) for reply in replies]

        return self.ask(namespace, ask)

    def _once(self, namespace: str, call: Callable[[RespConnection], T]) -> T:
        shared = self.endpoint.door
        paused = shared.paused()
        door = shared
        try:
            door = self._routes.door(namespace)
            paused = door.paused()
            return door.through(call)
        except StoreUnavailable as error:
            if not paused:
                self._routes.forget()
            if door is not shared and not paused and nobody_listens(error):
                raise _WorkerGone(str(error)) from error
            raise


def _range_command(namespace: str, run: Run) -> list[Any]:
    command = ["V.FETCH", _session(namespace, run), run.layer, "RANGE", run.start]
    command += [run.start + run.rows, "FMT", "STORED"]
    return command + (["LAYOUT", "HND"] if run.layout == "HND" else [])


def _session(namespace: str, run: Run) -> str:
    return f"{namespace}_p{run.side}"


def _size(blob: Any) -> int:
    return memoryview(blob).nbytes


def _blob_size(state: tuple[int, bytes, int]) -> int:
    return len(state[1])


def _run_size(pair: tuple[Run, Any]) -> int:
    return _size(pair[1])


def _grouped(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups of about ``PIPELINE_BYTES``: the unit in which progress is measured."""
    group: list[T] = []
    held = 0
    for item in items:
        group.append(item)
        held += size_of(item)
        if held >= PIPELINE_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _checked(reply: Any) -> Any:
    if isinstance(reply, CommandError):
        raise reply
    return reply


def mapping_of(reply: Any) -> dict[str, Any] | None:
    """The files of a namespace; None where the server names none, or cannot.

    Raises the refusal of a worker that does not have the namespace.
    """
    if isinstance(reply, CommandError) and named_worker(reply) is not None:
        raise reply
    try:
        mapping = json.loads(reply) if isinstance(reply, bytes) else None
    except ValueError:
        return None
    return mapping if isinstance(mapping, dict) else None


def missing(what: str) -> DamagedData:
    """The error for rows or states that a completion record promises."""
    return DamagedData(f"{what} is missing on the server")
