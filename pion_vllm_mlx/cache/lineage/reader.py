"""Restoring a prefix from the segments of a chain.

One round trip for the completion records, then rows and states by the lanes of the prompt
cache, a segment at a time. Every piece is proved: key, token ids, checksum of each run. The
rows of several segments are joined once, with spare rows behind them; those of a lone
segment are used as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache import direct_rows, evaluation
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord, Run
from pion_vllm_mlx.cache.direct_rows import MOST_SPARE_ROWS, SPARE_ROWS, DirectRows
from pion_vllm_mlx.cache.lanes import (
    LANE_ERRORS,
    LANES,
    MAPPED,
    STORED,
    RunArrays,
    Wanted,
    load_states,
)
from pion_vllm_mlx.cache.layers import cache_arrays, rebuild
from pion_vllm_mlx.cache.leaf import Side, dtype_of
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.counters import Counters
from pion_vllm_mlx.cache.lineage.coverage import joined, latest_point
from pion_vllm_mlx.cache.lineage.records import Claim, covered, links, proved, pruned, runs_for
from pion_vllm_mlx.cache.lineage.shape import (
    Shape,
    Slot,
    array_specs,
    classes_of,
    flat,
    slots_at,
    wanted_rows,
)
from pion_vllm_mlx.cache.lineage.types import Match, Piece
from pion_vllm_mlx.cache.mapped_files import MappedFiles
from pion_vllm_mlx.cache.slots_state import StateArrays
from pion_vllm_mlx.cache.store_client import mapping_of, missing
from pion_vllm_mlx.config import ClientSwitches
from pion_vllm_mlx.errors import CommandError, DamagedData, StoreUnavailable

log = logging.getLogger("pion_vllm_mlx")

States = Mapping[int, StateArrays]

MALFORMED = (TypeError, LookupError, AttributeError)
"""What an answer or a file of another shape may end in."""


class DamagedPiece(DamagedData):
    """A segment does not verify, or its checkpoint ``sid``.

    ``record`` is what was read as the completion record of it.
    """

    def __init__(
        self, sentence: str, segment: int, record: bytes | None, sid: str | None = None
    ) -> None:
        super().__init__(sentence)
        self.segment = segment
        self.record = record
        self.sid = sid


@dataclass(frozen=True)
class Loaded:
    """What a restore gave."""

    caches: list[Any]
    length: int
    lane: str
    num_bytes: int


@dataclass(frozen=True)
class _Proved:
    """A piece with its record and the server's files."""

    piece: Piece
    blob: bytes
    record: CompletionRecord
    mapping: Mapping[str, Any] | None


class Reader:
    """Restores matches, on one thread with a stream of its own; any may have the caches."""

    def __init__(
        self, client: LineageClient, shape: Shape, switches: ClientSwitches, counters: Counters
    ) -> None:
        self._client = client
        self._shape = shape
        self._switches = switches
        self._counters = counters

    def load(self, match: Match, identity: dict[str, Any], min_gain: int) -> Loaded | None:
        """The caches of a match; None where less than ``min_gain`` tokens of it are proved.

        Raises DamagedData, NewerFormat, StoreUnavailable.
        """
        pieces, checkpoint = self._proofs(match, identity)
        if checkpoint is not None:
            slots, length = checkpoint.slots, match.length
        else:
            length = self._provable(match, pieces)
            if length < min_gain or (self._shape.stateful and length < match.length):
                return None
            slots = slots_at(pieces[-1].record.slots, length)
        if classes_of(slots) != classes_of(self._shape.settings):
            raise DamagedData("completion record: its slots are not those of the model's cache")
        num_bytes = 0
        states: dict[int, StateArrays] = {}
        if checkpoint is not None and match.checkpoint is not None:
            num_bytes += sum(state.length for state in checkpoint.states)
            sid = match.checkpoint.sid
            with _blaming(pieces[-1].piece.segment, checkpoint.encode(), sid):
                states = load_states(self._client, Wanted(sid, checkpoint, None))
        loaded = self._directly(pieces, slots, states) or self._by_lanes(pieces, slots, states)
        evaluation.settle(cache_arrays(loaded.caches))
        return replace(loaded, length=length, num_bytes=loaded.num_bytes + num_bytes)

    # -- inside ---------------------------------------------------------------

    def _directly(
        self, pieces: Sequence[_Proved], slots: Sequence[Slot], states: States
    ) -> Loaded | None:
        """The caches, their rows read into place; None where the lanes have to see to it."""
        if not direct_rows.usable() or any(one.mapping is None for one in pieces):
            return None
        dtypes = _dtypes(slots)
        rows = DirectRows(lambda layer, side: dtypes[layer, side])
        wanted = wanted_rows(slots)
        try:
            for one in pieces:
                runs = runs_for(one.record, one.piece.base, wanted, one.piece.end)
                leaved = [(run, one.record.leaves[run.layer]) for run in runs]
                files = MappedFiles(one.mapping or {})
                if not rows.add(files, leaved, one.piece.base, one.piece.end):
                    return None
            if not evaluation.on_cuda() and rows.whole(wanted):
                return None
            caches = rebuild(slots, rows.fetch, states)
            rows.fill()
            return Loaded(caches, 0, MAPPED, rows.num_bytes)
        except (*LANE_ERRORS, *MALFORMED) as error:  # the lanes find out what it is
            self._counters.add("lane_failures", why=f"{MAPPED} lane: {error!r}")
            return None
        finally:
            rows.close()

    def _by_lanes(self, pieces: Sequence[_Proved], slots: Sequence[Slot], states: States) -> Loaded:
        """The caches, their rows by the first lane that delivers, a segment at a time."""
        wanted = wanted_rows(slots)
        lane, num_bytes = STORED, 0
        rows: list[tuple[int, Run, mx.array]] = []
        for one in pieces:
            runs = runs_for(one.record, one.piece.base, wanted, one.piece.end)
            what = Wanted(one.piece.namespace, pruned(one.record, runs), one.mapping)
            if runs:
                with _blaming(one.piece.segment, one.blob):
                    lane, arrays = self._through_lanes(what)
                rows += _placed(arrays, one.piece)
            num_bytes += what.num_bytes()
        caches = rebuild(slots, _Chain(rows, slots).fetch, states)
        return Loaded(caches, 0, lane, num_bytes)

    def _proofs(
        self, match: Match, identity: dict[str, Any]
    ) -> tuple[list[_Proved], CompletionRecord | None]:
        """The records of all pieces and of the checkpoint, in one round trip."""
        mapped = self._client.endpoint.local and not self._switches.no_mapped
        commands: list[Sequence[Any]] = []
        for piece in match.chain:
            commands.append(("SSM.PREFIX.FETCH", piece.namespace, COMPLETION_LAYER))
            if mapped:
                commands.append(("KV.PREFIX.MAP", piece.namespace))
        if match.checkpoint is not None:
            commands.append(("SSM.PREFIX.FETCH", match.checkpoint.sid, COMPLETION_LAYER))
        replies = self._client.pipeline(match.chain[0].namespace, commands)
        keys = links(identity, match.tokens, [piece.base for piece in match.chain])
        found = []
        for index, (piece, key) in enumerate(zip(match.chain, keys, strict=True)):
            reply, *mapping = replies[index * (1 + mapped) : (index + 1) * (1 + mapped)]
            blob = _blob(reply)
            claim = Claim(key, match.tokens[: piece.end], piece.base, piece.namespace)
            with _blaming(piece.segment, blob):
                record = _record(blob, claim)
            files = mapping_of(mapping[0]) if mapping else None
            found.append(_Proved(piece, blob or b"", record, files))
        if match.checkpoint is None:
            return found, None
        length, last = match.checkpoint.length, found[-1].piece
        claim = Claim(keys[-1], match.tokens[:length], last.base, match.checkpoint.sid)
        blob = _blob(replies[-1])
        with _blaming(last.segment, blob, match.checkpoint.sid):
            record = _record(blob, claim, whole=True)
        return found, record

    def _provable(self, match: Match, pieces: Sequence[_Proved]) -> int:
        """How many tokens the records prove, windows and all."""
        parts = [
            (covered(one.record, one.piece.base, one.piece.end), one.piece.base, one.piece.end)
            for one in pieces
        ]
        windows = joined(parts)
        for window in self._shape.windows:
            windows.setdefault(window, ())
        return latest_point(match.length, windows)

    def _through_lanes(self, wanted: Wanted) -> tuple[str, RunArrays]:
        """The first lane that delivers. Raises DamagedData, StoreUnavailable."""
        why = "no lane"
        for name, load in LANES.items():
            if name == MAPPED and wanted.mapping is None:
                continue
            if name == STORED and self._switches.no_batch:
                continue
            try:
                return name, load(self._client, wanted)
            except DamagedData:
                if name != MAPPED:
                    raise
                # files may be those of a moment ago: what crosses the socket is hashed here
                self._counters.add("lane_failures")
            except LANE_ERRORS as error:
                self._counters.add("lane_failures", why=f"{name} lane: {error}")
                why = str(error)
        raise StoreUnavailable(f"no lane delivered: {why}")


def _blob(reply: Any) -> bytes | None:
    if isinstance(reply, CommandError):
        raise StoreUnavailable(reply.sentence) from reply
    return reply if isinstance(reply, bytes) else None


def _record(blob: bytes | None, claim: Claim, *, whole: bool = False) -> CompletionRecord:
    """The record that proves all tokens of a claim. Raises DamagedData."""
    proof = proved(blob, claim)
    size = claim.tokens.size
    if proof.shared < size or (whole and claim.base + proof.record.ids.size != size):
        raise DamagedData(f"{claim.what}: its record is of other tokens")
    return proof.record


@contextmanager
def _blaming(segment: int, blob: bytes | None, sid: str | None = None) -> Iterator[None]:
    """Says of damage in which segment or checkpoint it is, and by which record."""
    try:
        yield
    except DamagedPiece:
        raise
    except DamagedData as error:
        raise DamagedPiece(str(error), segment, blob, sid) from error


def _placed(arrays: RunArrays, piece: Piece) -> list[tuple[int, Run, mx.array]]:
    """Runs by their absolute position, none past the end of the piece."""
    found = []
    for run, array in arrays:
        start = run.start + piece.base
        rows = min(run.rows, piece.end - start)
        found.append((piece.base, replace(run, start=start, rows=rows), array))
    return found


def _dtypes(slots: Sequence[Slot]) -> dict[tuple[int, Side], mx.Dtype]:
    """The dtype of the cache, by leaf and side."""
    return {
        (spec.layer, spec.side): dtype_of(spec.dtype)
        for slot in flat(slots)
        for spec in array_specs(slot)
    }


class _Chain:
    """Answers ``rebuild``'s questions out of the rows of several segments."""

    def __init__(self, rows: Sequence[tuple[int, Run, mx.array]], slots: Sequence[Slot]) -> None:
        self._dtypes = _dtypes(slots)
        self._runs: dict[tuple[int, str], list[tuple[Run, mx.array]]] = {}
        for _, run, array in rows:
            self._runs.setdefault((run.layer, run.side), []).append((run, array))

    def fetch(self, layer: int, side: Side, start: int, end: int) -> mx.array:
        """``[H, n_pad, D]`` in the cache's dtype, spare rows behind what was asked for."""
        pieces, rest = self._pieces(layer, side, start, end)
        if len(pieces) > 1 or not rest:
            last = pieces[-1]
            pieces.append(mx.zeros((last.shape[0], SPARE_ROWS, last.shape[2]), last.dtype))
        rows = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
        wanted = self._dtypes[layer, side]
        if rows.dtype in (wanted, mx.uint8):
            return rows
        return rows.astype(wanted)

    def _pieces(self, layer: int, side: Side, start: int, end: int) -> tuple[list[mx.array], bool]:
        """The arrays of the range in order; whether a lone one has rows to spare."""
        found: list[mx.array] = []
        at, lone = start, False
        for run, array in sorted(self._runs.get((layer, side), []), key=_run_start):
            last = min(run.start + run.rows, end)
            if not run.start <= at < last:
                continue
            spare = array.shape[1] - (end - run.start)
            lone = run.start == start and last == end and 0 < spare <= MOST_SPARE_ROWS
            if not lone:
                array = array[:, at - run.start : last - run.start, :]
            found.append(array)
            at = last
        if at < end:
            raise missing(f"leaf {layer} {side}: row {at}")
        return found, lone


def _run_start(pair: tuple[Run, mx.array]) -> int:
    return pair[0].start
