"""Which worker holds which session: the directory that the workers of a server share.

It is a log in one file that every worker follows into a dictionary of its own: asking costs
a read of 16 bytes and a look-up. Who changes something locks the file, reads on, appends,
and only then moves the header; a process that dies on the way, or whom the disk refuses,
leaves nothing behind. What became of sessions is told again until the disk takes it.

======  =========================================================================
offset  content (little endian)
======  =========================================================================
0       u64 generation, u64 bytes of log in the area of that generation
4096    area of even generations
2^32    area of odd generations; a log that has grown is rewritten into the other
======  =========================================================================

A record is u8 kind, u16 worker, u64 tokens, u64 value, u16 name length, name. The file
lasts as long as the server: a worker publishes what it recovered when it starts. Locks are a
process's own, since all workers have the file from the launcher, with one description.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.directory import Directory, Known, Listed, sides_of, together
from pion_vllm_mlx.server.lineage import lineage_of
from pion_vllm_mlx.server.store.files import pwrite_all, refusals
from pion_vllm_mlx.server.store.index import KEY_SUFFIX, group_of

_HEADER = struct.Struct("<QQ")
_RECORD = struct.Struct("<BHQQH")
_AREAS = (4096, 1 << 32)
#: a log is rewritten past this, and past so many times what is left of it then.
_KEEP_BYTES = 1 << 20
_HISTORY = 4
#: what the log and clients are told when the file cannot be written.
_REFUSED = "the directory of workers could not be written"


class Kind(IntEnum):
    """What a record says about a name; ``value`` in parentheses."""

    CLAIMED = 1  # a session that the worker is about to create
    PUBLISHED = 2  # a session that is there (deadline in ms, 0: none)
    GONE = 3
    PREFILL = 4  # a namespace's prefill time (ms, 0: unknown)
    TOUCHED = 5  # a namespace was hit on another worker


class SharedDirectory(Directory):
    """The directory of worker ``worker``, in the file ``descriptor``, which it takes over."""

    def __init__(self, descriptor: int, worker: int, ns_prefix: bytes = b"") -> None:
        super().__init__()
        self._ns_prefix = ns_prefix
        self.worker = worker
        self._fd = descriptor
        self._seen = b""
        self._generation = 0
        self._rewrite_at = _KEEP_BYTES
        self._position = 0
        self._listed: dict[bytes, Listed] = {}
        self._lineages: dict[bytes, Counter[int]] = {}
        self._claimed: set[bytes] = set()
        self._untold: dict[bytes, Known | None] = {}
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
        try:
            with self._changing():
                self._take_back()
                owner = self._other(together_all(sids))
                for lineage in filter(None, (self._lineage_of(sid) for sid in sids)):
                    owner = self._lineage_elsewhere(lineage) if owner is None else owner
                if owner is None:
                    claimed = {sid for sid in sids if sid not in self._listed}
                    self._append(self._record(Kind.CLAIMED, sid) for sid in claimed)
                    self._claimed = claimed
        except OSError as error:
            refusals.tell(_REFUSED, error)
            raise CommandError(f"{_REFUSED}: {error.strerror}") from error
        return owner

    def release(self) -> None:
        if self._claimed:
            with self._trying():
                self._take_back()

    def _take_back(self) -> None:
        self._append(self._record(Kind.GONE, sid) for sid in self._claimed)
        self._claimed = set()

    def publish(self, sessions: Mapping[bytes, Known | None]) -> None:
        self._claimed -= sessions.keys()
        self._untold.update(sessions)
        self._tell()

    def _tell(self) -> None:
        """Publish all that is due."""
        news = {sid: known for sid, known in self._untold.items() if self._differs(sid, known)}
        if not news:
            self._untold.clear()
            return
        with self._trying():
            self._append(self._news(sid, known) for sid, known in news.items())
            self._untold.clear()

    def start(self, sessions: Mapping[bytes, Known]) -> list[bytes]:
        """Publish what this worker recovered, in place of what it had before.

        Returns the sessions that another worker holds, too: they have to go here.
        """
        with self._changing():
            doubled = [sid for sid in sessions if self._other(together(sid)) is not None]
            mine = [sid for sid, listed in self._listed.items() if listed.owner == self.worker]
            self._untold.update((sid, None) for sid in mine if sid not in sessions)
            self._untold.update((sid, sessions[sid]) for sid in sessions.keys() - set(doubled))
            news = [self._news(sid, known) for sid, known in self._untold.items()]
            with _telling():
                self._append(news)
                self._untold.clear()
        return doubled

    def set_prefill(self, namespace: bytes, prefill_ms: int) -> None:
        if self.prefill_ms.get(namespace, 0) != prefill_ms:
            with self._trying():
                self._append([self._record(Kind.PREFILL, namespace, value=prefill_ms)])

    def touch(self, namespace: bytes) -> None:
        self._hit_here.add(namespace)

    def exchange(self) -> set[bytes]:
        if self._untold:
            self._tell()
        if self._hit_here:
            with self._trying():
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
        fcntl.lockf(self._fd, how)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The only one to write, and up to date."""
        with self._locked(fcntl.LOCK_EX):
            self._read()
            yield
            if self._position > self._rewrite_at:
                self._rewrite()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """As ``_changing``; what the disk refuses is said in the log, and not done."""
        with _telling(), self._changing():
            yield

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
            self._write(data, self._generation, self._position)
            self._apply(data)

    def _write(self, data: bytes, generation: int, position: int) -> None:
        """All of it, then the header; raises OSError, and then nothing is there."""
        pwrite_all(self._fd, data, _AREAS[generation % 2] + position)
        header = _HEADER.pack(generation, position + len(data))
        pwrite_all(self._fd, header, 0)
        self._generation, self._position = generation, position + len(data)
        self._seen = header

    def _rewrite(self) -> None:
        """Begin the other area with what the log comes to; where it does not fit, later."""
        snapshot = self._snapshot()
        self._rewrite_at = self._position + _KEEP_BYTES
        with _telling():
            self._write(snapshot, self._generation + 1, 0)
            self._rewrite_at = max(_KEEP_BYTES, _HISTORY * len(snapshot))

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


@contextmanager
def _telling() -> Iterator[None]:
    """A refusal of the disk ends what is done inside, and is said in the log."""
    try:
        yield
    except OSError as error:
        refusals.tell(_REFUSED, error)


def together_all(sids: Iterable[bytes]) -> set[bytes]:
    """All sessions that live where one of these does."""
    return {other for sid in sids for other in together(sid)}
