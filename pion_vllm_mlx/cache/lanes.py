"""The ways rows travel from the store: mapped files, all layers at once, run by run.

A lane gives, for every run of the completion record, an array of exactly those rows
(spare rows behind them allowed), proved to belong to the record:

* mapped: the server names the files of a namespace; each tensor must carry the run's
  checksum, which the server has verified since it started. ``verify="always"`` reads
  the rows again.
* stored, range: the bytes crossed a socket: their checksum is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.cache import direct_rows, evaluation
from pion_vllm_mlx.cache.completion import CompletionRecord, Run
from pion_vllm_mlx.cache.direct_rows import DirectRows
from pion_vllm_mlx.cache.lanes_codec import decode_rows, decode_tensors, run_bytes
from pion_vllm_mlx.cache.leaf import Side, as_stored_bytes
from pion_vllm_mlx.cache.mapped_files import MappedFiles, parts_of, tensors_of
from pion_vllm_mlx.cache.slots_state import StateArrays, decode_state
from pion_vllm_mlx.cache.store_client import StoreClient, missing
from pion_vllm_mlx.errors import DamagedData, PionError, StoreUnavailable

MAPPED, STORED, RANGE, IN_PROCESS = "mapped", "stored", "range", "in-process"

LANE_ERRORS = (PionError, OSError, RuntimeError, ValueError)
"""What a lane may fail with; MLX raises RuntimeError and ValueError for bad files."""


@dataclass(frozen=True)
class Wanted:
    """A prefix that was proved to be the right one, and where to get it."""

    namespace: str
    record: CompletionRecord
    mapping: Mapping[str, Any] | None
    verify_always: bool = False

    def leaf(self, run: Run) -> dict[str, Any]:
        try:
            return self.record.leaves[run.layer]
        except IndexError:
            raise DamagedData(f"completion record: no leaf {run.layer}") from None

    def num_bytes(self) -> int:
        """Bytes of all rows and states in their storage format."""
        rows = sum(run_bytes(self.leaf(run), run) for run in self.record.runs)
        return rows + sum(state.length for state in self.record.states)


RunArrays = list[tuple[Run, mx.array]]

_SIDES: tuple[Side, Side] = ("k", "v")


def load_mapped(client: StoreClient, wanted: Wanted) -> RunArrays:
    """Rows out of the server's files: lazy loads, for the caller to evaluate at once."""
    if wanted.mapping is None:
        return _load_exported(client, wanted)
    try:
        tensors = MappedFiles(wanted.mapping)
        arrays = _read_in_place(tensors, wanted) if evaluation.on_cuda() else None
        if arrays is None:
            arrays = [(run, tensors.rows(run, wanted.leaf(run))) for run in wanted.record.runs]
            evaluation.begin([array for _, array in arrays])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise StoreUnavailable(f"KV.PREFIX.MAP answered something else: {error!r}") from error
    if wanted.verify_always:
        _verify_mapped(tensors, wanted)
    return arrays


def _read_in_place(files: MappedFiles, wanted: Wanted) -> RunArrays | None:
    """The rows, read by several threads; None where some have to be decoded.

    Under CUDA mx.load reads tensor by tensor: 268 MB took an H200 77 to 94 ms, this 40 to 55.
    """
    if not direct_rows.usable():
        return None
    rows = DirectRows(lambda layer, side: None)
    runs = [(run, wanted.leaf(run)) for run in wanted.record.runs]
    try:
        if not rows.add(files, runs, 0, max(run.start + run.rows for run, _ in runs)):
            return None
        arrays = [
            (run, rows.fetch(run.layer, run.side, run.start, run.start + run.rows))
            for run, _ in runs
        ]
        rows.fill()
    finally:
        rows.close()
    return arrays


def _load_exported(client: StoreClient, wanted: Wanted) -> RunArrays:
    """Rows out of a file of V.EXPORT, from a server that does not know KV.PREFIX.MAP.

    Such a file carries no checksums: its rows are hashed here.
    """
    runs, leaves = wanted.record.runs, wanted.record.leaves
    rows = runs[0].rows
    shapes = {(leaf["heads"], leaf["k"], leaf["v"]) for leaf in leaves}
    heads, width, _ = next(iter(shapes))
    plain = all((r.start, r.rows, r.layout) == (0, rows, "HND") for r in runs)
    if not plain or shapes != {(heads, width, width)} or len(runs) != 2 * len(leaves):
        raise StoreUnavailable("the server names no files, and exports no such cache")
    path = client.export(wanted.namespace, rows, len(leaves), heads, width // heads)
    try:
        loaded = tensors_of(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise StoreUnavailable(f"the exported file cannot be read: {error}") from error
    arrays = []
    for run in runs:
        try:
            tensors = [part[0] for part in parts_of(loaded, f"{run.side}.{run.layer}")]
        except KeyError as error:
            raise StoreUnavailable(f"the exported file lacks {error}") from error
        _check(_wire_rows(tensors, run, 0), run)
        arrays.append((run, decode_tensors(tensors, run, heads)))
    evaluation.finish([array for _, array in arrays])
    return arrays


def load_stored(client: StoreClient, wanted: Wanted) -> RunArrays:
    """All layers of a side in one round trip, in the storage format.

    Where every layer has the same rows in one run that is a BATCH; for windows beside full
    layers it is one RANGE a run, sent together.
    """
    return [pair for side in _SIDES for pair in _side_stored(client, wanted, side)]


def _side_stored(client: StoreClient, wanted: Wanted, side: Side) -> RunArrays:
    """One side; its buffers are free again for the other one."""
    runs = [run for run in wanted.record.runs if run.side == side]
    if not runs:
        return []
    total = sum(run_bytes(wanted.leaf(run), run) for run in runs)
    if _uniform(runs):
        end, layers = runs[0].rows, max(run.layer for run in runs) + 1
        found = client.fetch_batch(wanted.namespace, side, end, layers, total)
        if len(found) != layers:
            raise StoreUnavailable("the server answered another number of layers")
        blobs = [found[run.layer] for run in runs]
    else:
        blobs = client.fetch_ranges(wanted.namespace, runs, total)
    return [_verified(blob, run, wanted) for blob, run in zip(blobs, runs, strict=True)]


def _uniform(runs: list[Run]) -> bool:
    """Whether BATCH gives the rows of all the runs, head-major, one item a layer."""
    end = runs[0].rows
    alike = all((run.start, run.rows, run.layout) == (0, end, "HND") for run in runs)
    return alike and len({run.layer for run in runs}) == len(runs)


def load_range(client: StoreClient, wanted: Wanted) -> RunArrays:
    """Run by run: for caches whose layers differ, and where BATCH failed."""
    arrays: RunArrays = []
    for run in wanted.record.runs:
        size = run_bytes(wanted.leaf(run), run)
        arrays.append(_verified(client.fetch_range(wanted.namespace, run, size), run, wanted))
    return arrays


Lane = Callable[[StoreClient, Wanted], RunArrays]

LANES: dict[str, Lane] = {MAPPED: load_mapped, STORED: load_stored, RANGE: load_range}
"""In the order in which they are tried."""


def load_states(client: StoreClient, wanted: Wanted) -> dict[int, StateArrays]:
    """The recurrent slots, each verified against the completion record."""
    expected = wanted.record.states
    if not expected:
        return {}
    total = sum(state.length for state in expected)
    blobs = client.fetch_states(wanted.namespace, [state.slot for state in expected], total)
    states = {}
    for state, blob in zip(expected, blobs, strict=True):
        if blob is None:
            raise missing(f"linear-half state was lost: slot {state.slot}")
        if len(blob) != state.length or crc32c(blob) != state.crc:
            raise DamagedData(f"recurrent state of slot {state.slot}: checksum does not match")
        states[state.slot] = decode_state(blob)
    return states


class RowSource:
    """Answers ``rebuild``'s questions for rows out of the arrays of a lane."""

    def __init__(self, arrays: RunArrays, dtypes: Mapping[tuple[int, Side], mx.Dtype]) -> None:
        self._runs: dict[tuple[int, str], RunArrays] = {}
        self._dtypes = dtypes
        for run, array in arrays:
            self._runs.setdefault((run.layer, run.side), []).append((run, array))

    def fetch(self, layer: int, side: Side, start: int, end: int) -> mx.array:
        """``[H, n_pad, D]`` in the cache's dtype; several runs are joined."""
        pieces: list[mx.array] = []
        at = start
        for run, array in sorted(self._runs.get((layer, side), []), key=_run_start):
            last = run.start + run.rows
            if not run.start <= at < min(last, end):
                continue
            if (run.start, last) != (start, end):  # else its spare rows are welcome
                array = array[:, at - run.start : min(last, end) - run.start, :]
            pieces.append(array)
            at = min(last, end)
        if at < end:
            raise missing(f"leaf {layer} {side}: row {at}")
        rows = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
        wanted = self._dtypes.get((layer, side))
        if wanted is None or rows.dtype in (wanted, mx.uint8):
            return rows
        return rows.astype(wanted)


def _run_start(pair: tuple[Run, mx.array]) -> int:
    return pair[0].start


def _check(rows: Any, run: Run) -> None:
    """Raises DamagedData for rows, as bytes, that are not those of the run."""
    if crc32c(rows) != run.crc:
        raise DamagedData(f"leaf {run.layer} {run.side}: checksum of its rows does not match")


def _verified(blob: NDArray[np.uint8] | None, run: Run, wanted: Wanted) -> tuple[Run, mx.array]:
    if blob is None:
        raise missing(f"leaf {run.layer} {run.side}")
    _check(blob.data, run)
    return run, decode_rows(blob, run, wanted.leaf(run))


def _verify_mapped(files: MappedFiles, wanted: Wanted) -> None:
    """Hashes the rows themselves again, in the order in which they were sent."""
    for run in wanted.record.runs:
        tensors, first = files.parts(run)
        _check(_wire_rows(tensors, run, first), run)


def _wire_rows(tensors: Iterable[mx.array], run: Run, first: int) -> Any:
    last = first + run.rows
    if run.layout == "HND":
        cut = [tensor[:, first:last, :] for tensor in tensors]
    else:
        cut = [tensor[first:last, :] for tensor in tensors]
    rows = [
        np.frombuffer(as_stored_bytes(part), np.uint8).reshape(-1, part.shape[-1] * part.itemsize)
        for part in cut
    ]
    return np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1))
