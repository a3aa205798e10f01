"""The state of a store and the one function that changes it.

``State.apply`` is the only writer, live and on replay: it asks no clock, draws no
random numbers and reads no file. Access order is the exception that is not
logged: reads touch it, and a snapshot writes sessions in that order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store import records
from pion_vllm_mlx.server.store.blocks import BlockTable
from pion_vllm_mlx.server.store.index import (
    KEY_SUFFIX,
    VALUE_SUFFIX,
    InSegment,
    LayerRows,
    Place,
    Run,
    Session,
    StateBlob,
    group_of,
    namespaces_of,
)
from pion_vllm_mlx.server.store.segment import Segment
from pion_vllm_mlx.server.store.shapes import LayerSpec, RunShape
from pion_vllm_mlx.server.store.wal import Inline, Logged

#: how many namespaces that went away are remembered, for EXPLAIN.
_GONE = 4096
#: more runs of a layer than this are too many, where they are short: in a quiet moment they become
#: one. Late, and once: each is written once more then. A reader pays some microseconds for each.
MANY_RUNS = 256


class InlineRun(NamedTuple):
    """A run that still rides in the log, as it was stored, and where it shows."""

    session: Session
    layer: int
    run: Run

    @property
    def group(self) -> bytes:
        return group_of(self.session.sid)


def _moved(run: Run, segment: Segment, offset: int, padded: int) -> Run:
    """The run that takes a run's place, with the same rows in a segment."""
    shape = replace(run.shape, padded=padded)
    return replace(run, place=InSegment(segment, offset), shape=shape)


class SavedState(NamedTuple):
    """Where a snapshot holds a short state."""

    sid: bytes
    layer: int
    place: Inline


@dataclass
class State:
    """Sessions by id, recurrent states by id and layer.

    ``states_under`` has the ids of states by each namespace that they belong to.
    ``segment_of`` finds the segment a record names (raises OSError);
    ``inline_runs`` has the runs that still ride in the log, by their numbers;
    ``unused`` collects segments in which nothing lives any more, for the store to unlink;
    ``timed`` has the ids of sessions with a deadline; ``untidy`` the groups in which
    something died, or whose runs are many, since they were last looked at; ``unshared``
    the sessions that got rows since these were last compared with others', unless
    ``compares`` is False: then nobody would take them out. ``before_change`` is told the id of
    a session, or of states, just before its content changes; what goes does not change.
    ``unpinned`` counts pins that were taken back, or went with their session.
    """

    segment_of: Callable[[str, bytes], Segment]
    sessions: dict[bytes, Session] = field(default_factory=dict)
    states: dict[bytes, dict[int, StateBlob]] = field(default_factory=dict)
    states_under: dict[bytes, dict[bytes, None]] = field(default_factory=dict)
    gone: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    inline_runs: dict[int, InlineRun] = field(default_factory=dict)
    unused: list[Segment] = field(default_factory=list)
    timed: set[bytes] = field(default_factory=set)
    untidy: dict[bytes, None] = field(default_factory=dict)
    unshared: dict[bytes, None] = field(default_factory=dict)
    compares: bool = True
    unpinned: int = 0
    fresh: bool = True
    before_change: Callable[[bytes], None] | None = field(default=None, repr=False)
    _inline_of: dict[bytes, dict[int, InlineRun]] = field(default_factory=dict)
    _clock: int = 0
    _free_slots: list[int] = field(default_factory=list)

    def apply(self, logged: Logged) -> None:
        """Carry out one record. Raises DamagedData when it does not fit the state."""
        record = logged.record
        match record:
            case records.Create():
                self._create(record)
            case records.Rows():
                self._rows(record, logged)
            case records.Drop():
                for sid in record.sids:
                    self._drop(sid, record.reason, record.at)
            case records.Truncate():
                self._truncate(record)
            case records.Blocks() | records.Pin() | records.Expire():
                self._keep(record)
            case records.Seal():
                self._seal(record)
            case records.StoreState():
                self._store_state(record, logged.place)
            case records.DropStates():
                for sid in record.sids:
                    self._drop_states(sid, record.layer)
            case _:
                raise DamagedData(f"no effect for {type(record).__name__}")

    def _changes(self, *sids: bytes) -> None:
        if self.before_change is not None:
            for sid in sids:
                self.before_change(sid)

    def touch(self, session: Session) -> None:
        """Make a session the most recently accessed one."""
        self._clock += 1
        session.accessed = self._clock

    def touch_states(self, sid: bytes) -> None:
        """Make the states of a sid the most recently accessed ones."""
        self._clock += 1
        for blob in self.states.get(sid, {}).values():
            blob.accessed = self._clock

    def sides(self, namespace: bytes) -> list[Session]:
        """The K and V sessions of a namespace that exist."""
        sids = (namespace + KEY_SUFFIX, namespace + VALUE_SUFFIX)
        return [self.sessions[sid] for sid in sids if sid in self.sessions]

    def by_access(self) -> list[Session]:
        """Sessions, least recently accessed first."""
        return sorted(self.sessions.values(), key=lambda session: session.accessed)

    def namespaces(self) -> list[bytes]:
        """Namespaces whose both sides live."""
        return [
            sid[: -len(KEY_SUFFIX)]
            for sid in self.sessions
            if sid.endswith(KEY_SUFFIX) and group_of(sid) + VALUE_SUFFIX in self.sessions
        ]

    def inline_groups(self) -> set[bytes]:
        """Groups with runs that still ride in the log."""
        return set(self._inline_of)

    def inline_of(self, group: bytes) -> Iterable[InlineRun]:
        """The runs of a group that still ride in the log, as they came."""
        return self._inline_of.get(group, {}).values()

    def move_inline_states(self, saved: Iterable[SavedState]) -> None:
        """Read short states from the snapshot that now holds them."""
        for sid, layer, place in saved:
            self.states[sid][layer].place = place

    def _create(self, record: records.Create) -> None:
        self._drop(record.sid, "replaced", 0)
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self.sessions)
        specs = {layer: LayerSpec(*spec) for layer, spec in record.specs.items()}
        session = Session(
            record.sid, slot, record.dim, record.requested, record.fmt, record.heads, specs
        )
        self.sessions[record.sid] = session
        self.gone.pop(group_of(record.sid), None)
        self.touch(session)

    def _rows(self, record: records.Rows, logged: Logged) -> None:
        self._changes(record.sid)
        session = self.sessions.get(record.sid)
        if session is None:
            raise DamagedData(f"rows of unknown session {record.sid!r}")
        session.checked = False
        spec = session.spec(record.layer)
        shape = RunShape(spec, record.rows, record.head_major, record.padded)
        group = group_of(record.sid)
        place = self._place(record, shape.file_bytes, group, logged.place)
        run_id = record.run_id or logged.lsn
        crcs = record.crc, record.sent_crc
        shown = record.shown or record.rows
        run = Run(run_id, record.start, shape, place, *crcs, self.fresh, shown)
        layer = session.layers.setdefault(record.layer, LayerRows(spec))
        if isinstance(place, Inline):
            inline = InlineRun(session, record.layer, run)
            self.inline_runs[run_id] = inline
            self._inline_of.setdefault(group, {})[run_id] = inline
        if record.start < layer.count or len(layer.extents) >= MANY_RUNS:
            self.untidy[group] = None
        if self.compares:
            self.unshared[record.sid] = None
        for dead in layer.insert(run):
            self._forget_run(dead, group)
        if not record.copied:
            self.touch(session)

    def _truncate(self, record: records.Truncate) -> None:
        self._changes(record.sid)
        session = self.sessions.get(record.sid)
        if session is None:
            raise DamagedData(f"truncation of unknown session {record.sid!r}")
        for number, length in record.lengths.items():
            layer = session.layers.get(number)
            if layer is None:
                continue
            self.untidy[group_of(record.sid)] = None
            for dead in layer.truncate(length):
                self._forget_run(dead, group_of(record.sid))
            if not layer.extents:
                del session.layers[number]

    def _keep(self, record: records.Blocks | records.Pin | records.Expire) -> None:
        """What is known about sessions beside their rows; one that went meanwhile stays away."""
        sids = (record.sid,) if isinstance(record, records.Blocks) else record.sids
        self._changes(*sids)
        for session in [self.sessions[sid] for sid in sids if sid in self.sessions]:
            match record:
                case records.Blocks():
                    session.blocks = BlockTable(record.block_size, bytes(record.hashes))
                case records.Pin():
                    self.unpinned += session.pinned and not record.pinned
                    session.pinned = record.pinned
                case records.Expire():
                    session.deadline_ms = record.deadline_ms
                    self.timed.discard(session.sid)
                    if record.deadline_ms:
                        self.timed.add(session.sid)

    def _place(
        self,
        record: records.Rows | records.StoreState,
        nbytes: int,
        group: bytes,
        inline: Inline | None,
    ) -> Place:
        if record.segment:
            segment = self.segment_of(record.segment, group)
            segment.settle(group, record.offset + nbytes)
            if not segment.sealed:
                segment.data_start = min(segment.data_start, record.offset)
            return InSegment(segment, record.offset)
        if inline is None:
            raise DamagedData("a record without a place for its bytes")
        return inline

    def _leave(self, place: Place, group: bytes, nbytes: int) -> None:
        if isinstance(place, InSegment):
            place.segment.leave(group, nbytes)
            if place.segment.uses == 0:
                self.unused.append(place.segment)
            else:
                self.untidy[place.segment.group] = None

    def _forget_run(self, run: Run, group: bytes) -> None:
        self._rides_no_more(run.run_id)
        self._leave(run.place, group, run.shape.file_bytes)

    def _rides_no_more(self, run_id: int) -> InlineRun | None:
        inline = self.inline_runs.pop(run_id, None)
        if inline is not None:
            mates = self._inline_of[inline.group]
            del mates[run_id]
            if not mates:
                del self._inline_of[inline.group]
        return inline

    def _drop(self, sid: bytes, reason: str, at: int) -> None:
        session = self.sessions.pop(sid, None)
        if session is None:
            return
        self.timed.discard(sid)
        self.unshared.pop(sid, None)
        self.unpinned += session.pinned
        heapq.heappush(self._free_slots, session.slot)
        for run in session.runs():
            self._forget_run(run, group_of(sid))
        if reason != "replaced":
            self._remember(group_of(sid), reason, at)

    def _remember(self, namespace: bytes, reason: str, at: int) -> None:
        self.gone.pop(namespace, None)
        self.gone[namespace] = (reason, at)
        if len(self.gone) > _GONE:
            del self.gone[next(iter(self.gone))]

    def _seal(self, record: records.Seal) -> None:
        segment = self.segment_of(record.segment, b"")
        segment.sealed = segment.closed = True
        segment.size = record.size
        segment.header_bytes = record.header_bytes
        segment.header_crc = record.header_crc
        segment.header_verified = self.fresh
        moved: dict[tuple[bytes, int], dict[int, tuple[int, int]]] = {}
        for run_id, offset, padded in record.moves:
            inline = self._rides_no_more(run_id)
            if inline is None:
                continue
            sid, group = inline.session.sid, inline.group
            self._changes(group + KEY_SUFFIX, group + VALUE_SUFFIX, group)
            # a segment that was made for them belongs to their group
            end = offset + replace(inline.run.shape, padded=padded).file_bytes
            self.segment_of(record.segment, group).settle(group, end)
            moved.setdefault((sid, inline.layer), {})[run_id] = offset, padded
        for (sid, number), places in moved.items():
            rows = self.sessions[sid].layers[number]
            runs = [run for run in rows.runs() if run.run_id in places]
            rows.replace_runs(
                {run.run_id: _moved(run, segment, *places[run.run_id]) for run in runs}
            )

    def _store_state(self, record: records.StoreState, inline: Inline | None) -> None:
        self._changes(record.sid)
        place = self._place(record, record.length, record.sid, inline)
        layers = self.states.setdefault(record.sid, {})
        if not layers:
            for namespace in namespaces_of(record.sid):
                self.states_under.setdefault(namespace, {})[record.sid] = None
        old = layers.get(record.layer)
        blob = StateBlob(record.length, record.crc, place, self.fresh)
        layers[record.layer] = blob
        if old is not None:
            self._leave(old.place, record.sid, old.length)
        if old is not None and (old.length, old.crc) == (blob.length, blob.crc):
            blob.accessed = old.accessed  # it was only moved
        elif self.fresh:  # what was there before a start is older than what came since
            self.touch_states(record.sid)

    def _drop_states(self, sid: bytes, layer: int) -> None:
        self._changes(sid)
        layers = self.states.get(sid, {})
        chosen: Iterable[int] = list(layers) if layer < 0 else [layer]
        for number in chosen:
            blob = layers.pop(number, None)
            if blob is not None:
                self._leave(blob.place, sid, blob.length)
        if not layers and self.states.pop(sid, None) is not None:
            for namespace in namespaces_of(sid):
                under = self.states_under[namespace]
                del under[sid]
                if not under:
                    del self.states_under[namespace]
