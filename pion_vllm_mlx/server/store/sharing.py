"""Equal rows of one tenant are stored once: found afterwards, in quiet moments.

Nothing is hashed for it: every run has its checksum. The runs of a session's first layer
lead to sessions that hold a run of the same place, shape and checksum; all layers of the
two are then compared run by run. A checksum never suffices: the bytes of both runs are
read and compared, then a record like that of a copy (``compaction``) lays the run in the
older segment over the rows in the newer one. What these had is dead, and reclaimed like
anything dead.

Only runs of the same layer, side and position are compared: equal prefixes have no
others, and the tensor of a published file keeps the name by which it is asked for.
Names of different tenants differ before their first colon; sessions whose names do never
share, whether tenants are configured or not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from crc32c import crc32c

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store.files import pread_into
from pion_vllm_mlx.server.store.index import (
    Extent,
    InSegment,
    LayerRows,
    Run,
    Session,
    group_of,
    place_file,
    same_place,
)
from pion_vllm_mlx.server.store.records import Record, Rows
from pion_vllm_mlx.server.store.rows import as_bytes, check_run, combine_crcs
from pion_vllm_mlx.server.store.sealing import side_of
from pion_vllm_mlx.server.store.shapes import Piece
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.store.verifying import drop_damaged

log = logging.getLogger(__name__)

#: bytes that one step compares, at most by one run more.
STEP_BYTES = 32 << 20
#: smaller runs free no block of a disk.
MIN_SHARED_BYTES = 4 << 10
#: two buffers of this are read in turn.
_WINDOW_BYTES = 512 << 10
#: how many runs of a first layer are looked up, and how many sessions each may lead to.
_MARKS, _CANDIDATES = 16, 8
#: how long one step may look for something to do, on the event loop.
_LOOK_SECONDS = 0.002


def domain_of(sid: bytes) -> bytes:
    """What sessions have in common that may share: the name's part before the first colon."""
    name, colon, _ = sid.partition(b":")
    return name + colon if colon else b""


@dataclass(frozen=True)
class Pair:
    """A run that shows whole, and another session's with the same checksum, older on disk."""

    layer: int
    session: Session
    run: Run
    other: Session
    original: Run

    def effect(self, state: State) -> Iterator[Record]:
        """The record that makes the run the original, unless one of them is no longer there."""
        place = self.original.place
        there = _alive(state, self.other, self.layer, self.original)
        if not (there and isinstance(place, InSegment) and place.segment.sealed):
            return
        if not _alive(state, self.session, self.layer, self.run, whole=True):
            return
        shape = self.original.shape
        layout = (shape.rows, shape.head_major, shape.padded)
        crcs = (self.original.crc, self.original.sent_crc)
        where = (place.segment.name, place.offset)
        yield Rows(
            self.session.sid, self.layer, self.run.start, *layout, *crcs, *where, copied=True
        )

    def equal(self) -> bool:
        """Whether both hold the same bytes, and these have their checksum.

        Reads the disk a window at a time; raises OSError.
        """
        crcs = []
        parts = zip(self.run.shape.part_offsets(), self.original.shape.part_offsets(), strict=True)
        for (part, base), (_, original_base) in parts:
            mine = self.run.shape.part_pieces(part, base, 0, self.run.shape.rows)
            shape = self.original.shape
            theirs = shape.part_pieces(part, original_base, 0, shape.rows)
            crc = 0
            for piece, original in zip(mine, theirs, strict=True):
                found = self._compare(piece, original, crc)
                if found is None:
                    return False
                crc = found
            crcs.append(crc)
        return combine_crcs(crcs) == self.run.crc

    def _compare(self, piece: Piece, original: Piece, crc: int) -> int | None:
        """The checksum going on over these bytes, or None where they differ."""
        mine, theirs = place_file(self.run.place), place_file(self.original.place)
        size = max(1, min(_WINDOW_BYTES, piece.length))
        left, right = np.empty(size, np.uint8), np.empty(size, np.uint8)
        for at in range(0, piece.length, size):
            count = min(size, piece.length - at)
            a, b = left[:count], right[:count]
            pread_into(mine.fd, as_bytes(a), self.run.place.offset + piece.offset + at)
            pread_into(theirs.fd, as_bytes(b), self.original.place.offset + original.offset + at)
            if not np.array_equal(a, b):
                return None
            crc = crc32c(as_bytes(a), crc)
        return crc


def _alive(state: State, session: Session, layer: int, run: Run, whole: bool = False) -> bool:
    """Whether a session shows a run, or with ``whole`` all of it and in one piece."""
    rows = session.layers.get(layer)
    if state.sessions.get(session.sid) is not session or rows is None:
        return False
    return any(extent.run is run and (_whole(extent) or not whole) for extent in rows.extents)


def _whole(extent: Extent) -> bool:
    run = extent.run
    return extent.row == 0 and extent.end - extent.start == run.shape.rows == run.shown


def _alike(one: Run, other: Run) -> bool:
    """Whether ``other`` may hold what ``one`` does, with as many spare rows behind it."""
    a, b = one.shape, other.shape
    same = (a.spec, a.rows, a.head_major) == (b.spec, b.rows, b.head_major)
    return same and one.crc == other.crc and one.sent_crc == other.sent_crc and b.padded >= a.padded


def _age(run: Run) -> tuple[bool, str, int]:
    """Sorts runs by the age of their segments, which are named by time; the log comes last."""
    place = run.place
    if isinstance(place, InSegment):
        return False, place.segment.name, place.offset
    return True, "", run.run_id


def _marks(session: Session) -> list[int]:
    """What the first runs of the first layer can be found by; collisions do no harm."""
    if not session.layers:
        return []
    layer = min(session.layers)
    common = (domain_of(session.sid), side_of(session.sid), layer)
    return [
        hash((common, run.start, run.shape.spec, run.shape.rows, run.shape.head_major, run.crc))
        for run in islice(session.layers[layer].runs(), _MARKS)
    ]


def _by_start(rows: LayerRows) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for run in rows.runs():
        found.setdefault(run.start, []).append(run)
    return found


class Index:
    """Sessions by the marks of their first runs; those that went are forgotten in time."""

    def __init__(self) -> None:
        self._sids: dict[int, list[bytes]] = {}
        self._marks: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def others(self, session: Session) -> list[bytes]:
        """The sessions, first come first, that have a mark in common with this one."""
        found: dict[bytes, None] = {}
        for mark in _marks(session):
            found.update(dict.fromkeys(self._sids.get(mark, ())[:_CANDIDATES]))
        found.pop(session.sid, None)
        return list(found)

    def put(self, session: Session) -> None:
        """Let a session be found, by what it holds now."""
        marks = _marks(session)
        if marks == self._marks.get(session.sid):
            return
        self.remove(session.sid)
        self._marks[session.sid] = marks
        for mark in marks:
            self._sids.setdefault(mark, []).append(session.sid)

    def remove(self, sid: bytes) -> None:
        for mark in self._marks.pop(sid, ()):
            sids = self._sids.get(mark, [])
            if sid in sids:
                sids.remove(sid)
            if not sids:
                self._sids.pop(mark, None)

    def keep(self, state: State) -> None:
        """Forget sessions that went, when they are many."""
        if len(self._marks) > 2 * len(state.sessions) + 64:
            for sid in [sid for sid in self._marks if sid not in state.sessions]:
                self.remove(sid)


class Sharer:
    """Shares the rows of one store. Used on its event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index = Index()

    async def step(self) -> bool:
        """Compare a session's rows with others', or a part; whether there was something to do.

        Raises CommandError or OSError when the disk refuses; the session is then left alone
        until it changes again.
        """
        state, ends_at = self._store.state, time.monotonic() + _LOOK_SECONDS
        self._index.keep(state)
        while state.unshared and time.monotonic() < ends_at:
            sid = next(iter(state.unshared))
            del state.unshared[sid]
            session = state.sessions.get(sid)
            if session is None:
                continue
            pairs = self._pairs(session)
            self._index.put(session)
            if pairs:
                await self._share(session, pairs)
                return True
        return False

    def _candidates(self, session: Session) -> list[Session]:
        found = []
        for sid in self._index.others(session):
            other = self._store.state.sessions.get(sid)
            if other is None:
                self._index.remove(sid)
            elif domain_of(sid) == domain_of(session.sid):
                found.append(other)
        return found[:_CANDIDATES]

    def _pairs(self, session: Session) -> list[Pair]:
        """What may be equal, about STEP_BYTES of it. Reads no rows."""
        candidates = self._candidates(session)
        pairs: list[Pair] = []
        total = 0
        for layer, rows in session.layers.items() if candidates else ():
            originals = [
                (other, _by_start(other.layers[layer]))
                for other in candidates
                if layer in other.layers and side_of(other.sid) == side_of(session.sid)
            ]
            for run in [extent.run for extent in rows.extents if _whole(extent)]:
                if run.shape.data_bytes < MIN_SHARED_BYTES:
                    continue
                pair = self._pair(layer, session, run, originals)
                if pair is not None:
                    pairs.append(pair)
                    total += run.shape.data_bytes
                    if total >= STEP_BYTES:
                        return pairs
        return pairs

    def _pair(
        self,
        layer: int,
        session: Session,
        run: Run,
        originals: list[tuple[Session, dict[int, list[Run]]]],
    ) -> Pair | None:
        """The run with the oldest that it may be. Where that is itself the others get their turn.

        So both sides of all prefixes end in the same segments, whoever is looked at first.
        """
        alike = [
            (other, one)
            for other, runs in originals
            for one in runs.get(run.start, ())
            if _alike(run, one) and not same_place(run.place, one.place)
        ]
        if not alike:
            return None
        other, original = min(alike, key=lambda entry: _age(entry[1]))
        if _age(original) < _age(run):
            return Pair(layer, session, run, other, original)
        self._store.state.unshared.update((one.sid, None) for one, _ in alike)
        return None

    async def _share(self, session: Session, pairs: list[Pair]) -> None:
        store = self._store
        if groups := {group_of(p.other.sid) for p in pairs if not _published(p.original)}:
            for group in groups:
                await store.seal(group)
            if store.state.sessions.get(session.sid) is not session:
                return
            # runs that were in the log are others now
            pairs = self._pairs(session)
        pairs = [pair for pair in pairs if _published(pair.original)]
        equal, damaged = await store.run(lambda: _judged(pairs))
        for victim, why in damaged:
            log.warning("rows that should be shared: %s", why)
            await drop_damaged(store, [victim], why)
        if not equal:
            return
        made: list[tuple[Pair, Record]] = []

        def build() -> list[Record]:
            if store.saver.binds():  # a save may have begun since this step did
                return []
            made.extend((pair, effect) for pair in equal for effect in pair.effect(store.state))
            return [effect for _, effect in made]

        await store.commit(build, copied=True)
        store.counters.bytes_shared += sum(pair.run.shape.data_bytes for pair, _ in made)


def _published(run: Run) -> bool:
    return isinstance(run.place, InSegment) and run.place.segment.sealed


def _judged(pairs: list[Pair]) -> tuple[list[Pair], list[tuple[Session, str]]]:
    """The pairs of equal bytes, and sessions whose rows do not verify. Blocks; raises OSError."""
    equal, damaged = [], []
    for pair in pairs:
        try:
            if pair.equal():
                equal.append(pair)
                continue
        except OSError as error:
            log.warning("rows cannot be compared: %s", error)
        for session, run in ((pair.session, pair.run), (pair.other, pair.original)):
            try:
                check_run(run)
            except DamagedData as error:
                damaged.append((session, str(error)))
    return equal, damaged
