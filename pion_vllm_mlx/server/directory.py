"""Which worker holds which session: the directory that the workers of a server share.

It is a log in one file that every worker follows into a dictionary of its own: asking costs
a read of 16 bytes and a look-up. Who changes something locks the file, reads on, appends,
and only then moves the header; a process that dies on the way leaves nothing behind.

======  =========================================================================
offset  content (little endian)
======  =========================================================================
0       u64 generation, u64 bytes of log in the area of that generation
4096    area of even generations
2^32    area of odd generations; a log that has grown is rewritten into the other
======  =========================================================================

A record is u8 kind, u16 worker, u64 tokens, u64 value, u16 name length, name. The file
lasts as long as the server: a worker publishes what it recovered when it starts.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from pion_vllm_mlx.server.lineage import lineage_of
from pion_vllm_mlx.server.store.files import FILE_MODE
from pion_vllm_mlx.server.store.index import KEY_SUFFIX, VALUE_SUFFIX, group_of

_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<BHQQH")
_AREAS = (4096, 1 << 32)
#: a log is rewritten past this, and past so many times what is left of it then.
_KEEP_BYTES = 1 << 20
_HISTORY = 4


class Kind(IntEnum):
    """What a record says about a name; ``value`` in parentheses."""

    CLAIMED = 1  # a session that the worker is about to create
    PUBLISHED = 2  # a session that is there (deadline in ms, 0: none)
    GONE = 3
    PREFILL = 4  # a namespace's prefill time (ms, 0: unknown)
    TOUCHED = 5  # a namespace was hit on another worker


class Listed(NamedTuple):
    """A session as the other workers know it: K sides carry the rows of layer 0."""

    owner: int
    published: bool
    tokens: int = 0
    deadline_ms: int = 0

    def alive(self) -> bool:
        """Whether a lookup may hit it."""
        return self.published and not 0 < self.deadline_ms <= time.time() * 1000


class Known(NamedTuple):
    """What a worker publishes about one of its sessions."""

    tokens: int
    deadline_ms: int


def sides_of(namespace: bytes) -> tuple[bytes, bytes]:
    """The session ids of both sides."""
    return namespace + KEY_SUFFIX, namespace + VALUE_SUFFIX


def together(sid: bytes) -> tuple[bytes, ...]:
    """The sessions that live where this one does: both sides of its namespace, or itself."""
    return (sid,) if group_of(sid) == sid else sides_of(group_of(sid))


class Directory:
    """The directory of a server with one worker: nothing is elsewhere."""

    def __init__(self) -> None:
        self.prefill_ms: dict[bytes, int] = {}

    def home(self, sids: Iterable[bytes]) -> int | None:
        """The other worker that holds one of these sessions; None when no other does."""
        return None

    def elsewhere(self, namespace: bytes) -> int | None:
        """Rows of layer 0 of a namespace that another worker can serve; None without one."""
        return None

    def expired(self, namespace: bytes) -> bool:
        """Whether a side of a namespace of another worker is past its deadline."""
        return False

    def lineage_home(self, lineage: bytes) -> int | None:
        """The other worker that holds segments of a lineage; None when none does, or this one."""
        return None

    def count(self) -> int | None:
        """How many sessions all workers have published; None where only one could."""
        return None

    def claim(self, sids: Iterable[bytes]) -> int | None:
        """Reserve sessions for this worker, or say which other one has them or their lineage.

        Under the store's write lock: a claim that is not published before the next one is
        taken back.
        """
        return None

    def release(self) -> None:
        """Take back what was claimed and not published; not while a claim is being used."""

    def publish(self, sessions: Mapping[bytes, Known | None]) -> None:
        """Tell all workers what became of sessions of this one; None: gone."""

    def set_prefill(self, namespace: bytes, prefill_ms: int) -> None:
        """Keep a namespace's prefill time; 0 forgets it."""
        self.prefill_ms.pop(namespace, None)
        if prefill_ms:
            self.prefill_ms[namespace] = prefill_ms

    def touch(self, namespace: bytes) -> None:
        """A namespace of another worker was hit here; told with the next ``exchange``."""

    def exchange(self) -> set[bytes]:
        """Send what was touched here; the namespaces of this worker that others hit."""
        return set()

    def close(self) -> None:
        """Release the file."""


class SharedDirectory(Directory):
    """The directory of worker ``worker``, in the file at ``path``. Raises OSError."""

    def __init__(self, path: Path, worker: int, ns_prefix: bytes = b"") -> None:
        super().__init__()
        self._ns_prefix = ns_prefix
        self.worker = worker
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._seen = b""
        self._generation = 0
        self._rewrite_at = _KEEP_BYTES
        self._position = 0
        self._listed: dict[bytes, Listed] = {}
        self._lineages: dict[bytes, Counter[int]] = {}
        self._claimed: set[bytes] = set()
        self._hit_here: set[bytes] = set()
        self._hit_there: set[bytes] = set()

    def close(self) -> None:
        os.close(self._fd)

    # -- asking ----------------------------------------------------------------

    def home(self, sids: Iterable[bytes]) -> int | None:
        self._follow()
        return self._other(sids)

    def elsewhere(self, namespace: bytes) -> int | None:
        self._follow()
        keys, values = (self._listed.get(sid) for sid in sides_of(namespace))
        if keys is None or values is None or not (keys.alive() and values.alive()):
            return None
        return None if self.worker in (keys.owner, values.owner) else keys.tokens

    def expired(self, namespace: bytes) -> bool:
        self._follow()
        sides = (self._listed.get(sid) for sid in sides_of(namespace))
        return any(side.published and not side.alive() for side in sides if side is not None)

    def lineage_home(self, lineage: bytes) -> int | None:
        self._follow()
        return self._lineage_elsewhere(lineage)

    def _lineage_elsewhere(self, lineage: bytes) -> int | None:
        owners: Mapping[int, int] = self._lineages.get(lineage, {})
        return None if self.worker in owners else min(owners, default=None)

    def count(self) -> int:
        self._follow()
        return sum(listed.published for listed in self._listed.values())

    def _other(self, sids: Iterable[bytes]) -> int | None:
        for sid in sids:
            listed = self._listed.get(sid)
            if listed is not None and listed.owner != self.worker:
                return listed.owner
        return None

    # -- telling ---------------------------------------------------------------

    def claim(self, sids: Iterable[bytes]) -> int | None:
        sids = list(sids)
        with self._changing():
            self._take_back()
            owner = self._other(together_all(sids))
            for lineage in filter(None, (self._lineage_of(sid) for sid in sids)):
                owner = self._lineage_elsewhere(lineage) if owner is None else owner
            if owner is None:
                self._claimed = {sid for sid in sids if sid not in self._listed}
                self._append(self._record(Kind.CLAIMED, sid) for sid in self._claimed)
        return owner

    def release(self) -> None:
        if self._claimed:
            with self._changing():
                self._take_back()

    def _take_back(self) -> None:
        self._append(self._record(Kind.GONE, sid) for sid in self._claimed)
        self._claimed.clear()

    def publish(self, sessions: Mapping[bytes, Known | None]) -> None:
        self._claimed -= sessions.keys()
        new = {sid: known for sid, known in sessions.items() if self._differs(sid, known)}
        if new:
            with self._changing():
                self._append(self._news(sid, known) for sid, known in new.items())

    def start(self, sessions: Mapping[bytes, Known]) -> list[bytes]:
        """Publish what this worker recovered, in place of what it had before.

        Returns the sessions that another worker holds, too: they have to go here.
        """
        with self._changing():
            doubled = [sid for sid in sessions if self._other(together(sid)) is not None]
            mine = [sid for sid, listed in self._listed.items() if listed.owner == self.worker]
            gone = [sid for sid in mine if sid not in sessions]
            self._append(self._record(Kind.GONE, sid) for sid in gone)
            self._append(self._news(sid, sessions[sid]) for sid in sessions.keys() - set(doubled))
        return doubled

    def set_prefill(self, namespace: bytes, prefill_ms: int) -> None:
        if self.prefill_ms.get(namespace, 0) != prefill_ms:
            with self._changing():
                self._append([self._record(Kind.PREFILL, namespace, value=prefill_ms)])

    def touch(self, namespace: bytes) -> None:
        self._hit_here.add(namespace)

    def exchange(self) -> set[bytes]:
        if self._hit_here:
            with self._changing():
                self._append(self._record(Kind.TOUCHED, name) for name in self._hit_here)
            self._hit_here.clear()
        self._follow()
        touched, self._hit_there = self._hit_there, set()
        return touched

    def _differs(self, sid: bytes, known: Known | None) -> bool:
        listed = self._listed.get(sid)
        if known is None:
            return listed is not None and listed.owner == self.worker
        return listed != Listed(self.worker, True, *known)

    def _news(self, sid: bytes, known: Known | None) -> bytes:
        if known is None:
            return self._record(Kind.GONE, sid)
        return self._record(Kind.PUBLISHED, sid, known.tokens, known.deadline_ms)

    def _record(self, kind: Kind, name: bytes, tokens: int = 0, value: int = 0) -> bytes:
        return _RECORD.pack(kind, self.worker, tokens, value, len(name)) + name

    # -- the file --------------------------------------------------------------

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        fcntl.flock(self._fd, how)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The only one to write, and up to date."""
        with self._locked(fcntl.LOCK_EX):
            self._read()
            yield
            if self._position > self._rewrite_at:
                self._rewrite()

    def _follow(self) -> None:
        if os.pread(self._fd, _HEADER.size, 0) != self._seen:
            with self._locked(fcntl.LOCK_SH):
                self._read()

    def _read(self) -> None:
        """Apply what was appended since the last time."""
        header = os.pread(self._fd, _HEADER.size, 0)
        if header == self._seen:
            return
        generation, length = _HEADER.unpack(header or bytes(_HEADER.size))
        if generation != self._generation:
            self._generation, self._position = generation, 0
            self._listed.clear()
            self._lineages.clear()
            self.prefill_ms.clear()
        start = _AREAS[generation % 2] + self._position
        self._apply(os.pread(self._fd, length - self._position, start))
        self._seen, self._position = header, length

    def _append(self, records: Iterable[bytes]) -> None:
        data = b"".join(records)
        if data:
            self._apply(data)
            self._write(data)

    def _write(self, data: bytes) -> None:
        os.pwrite(self._fd, data, _AREAS[self._generation % 2] + self._position)
        self._position += len(data)
        self._seen = _HEADER.pack(self._generation, self._position)
        os.pwrite(self._fd, self._seen, 0)

    def _rewrite(self) -> None:
        """Begin the other area with what the log comes to."""
        snapshot = self._snapshot()
        self._generation += 1
        self._position = 0
        self._rewrite_at = max(_KEEP_BYTES, _HISTORY * len(snapshot))
        self._write(snapshot)

    def _snapshot(self) -> bytes:
        records = [
            _RECORD.pack(
                Kind.PUBLISHED if listed.published else Kind.CLAIMED,
                *(listed.owner, listed.tokens, listed.deadline_ms, len(sid)),
            )
            + sid
            for sid, listed in self._listed.items()
        ]
        times = self.prefill_ms.items()
        records += [self._record(Kind.PREFILL, name, value=value) for name, value in times]
        return b"".join(records)

    def _apply(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            kind, owner, tokens, value, length = _RECORD.unpack_from(data, at)
            at += _RECORD.size + length
            self._learn(Kind(kind), data[at - length : at], Listed(owner, False, tokens, value))

    def _learn(self, kind: Kind, name: bytes, said: Listed) -> None:
        match kind:
            case Kind.CLAIMED:
                self._list(name, said)
            case Kind.PUBLISHED:
                self._list(name, said._replace(published=True))
            case Kind.GONE:
                self._list(name, None)
                self.prefill_ms.pop(group_of(name), None)
            case Kind.PREFILL:
                super().set_prefill(name, said.deadline_ms)
            case Kind.TOUCHED:
                listed = self._listed.get(name + KEY_SUFFIX)
                if listed is not None and listed.owner == self.worker:
                    self._hit_there.add(name)

    def _lineage_of(self, sid: bytes) -> bytes | None:
        return lineage_of(group_of(sid), self._ns_prefix)

    def _list(self, name: bytes, listed: Listed | None) -> None:
        """Note or forget a session; counts the segments of its lineage by worker."""
        old = self._listed.pop(name, None)
        if listed is not None:
            self._listed[name] = listed
        lineage = self._lineage_of(name)
        if lineage is None or (old and old.owner) == (listed and listed.owner):
            return
        owners = self._lineages.setdefault(lineage, Counter())
        for change, one in ((-1, old), (1, listed)):
            if one is not None:
                owners[one.owner] += change
                if not owners[one.owner]:
                    del owners[one.owner]
        if not owners:
            del self._lineages[lineage]


def together_all(sids: Iterable[bytes]) -> set[bytes]:
    """All sessions that live where one of these does."""
    return {other for sid in sids for other in together(sid)}
