"""Rows read from the server's files straight into the buffers of the caches that get them.

mx.load reads whole tensors, one after the other, and rows of several segments have to be joined
behind it. Here each buffer is made once, as long as it has to be, and threads read into it only
the rows that are wanted. MLX gives the memory of an evaluated array as a writable buffer (its
documentation, "Conversion to NumPy and other frameworks"); ``usable`` proves once a process that
what is written there is what the device computes with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from pion_vllm_mlx.cache import evaluation
from pion_vllm_mlx.cache.completion import Run
from pion_vllm_mlx.cache.leaf import Side
from pion_vllm_mlx.cache.mapped_files import MappedFiles, RowsInFile
from pion_vllm_mlx.cache.pace import between_pieces, in_company
from pion_vllm_mlx.cache.store_client import missing
from pion_vllm_mlx.errors import StoreUnavailable

SPARE_ROWS = 256
"""Behind the rows, so that the first token after them costs no copy."""

MOST_SPARE_ROWS = 1024
"""A mapped run that is longer than what is wanted by more is cut: it would stay in memory."""

_MOST_AHEAD = 4
"""Buffers that are read before they move to a GPU, where somebody generates meanwhile."""

_MOST_THREADS = 16
"""On 16 cores 268 MB into fresh memory of an H200 took 54 ms with 16, 100 ms with 8."""

_ALONE_BYTES = 4_000_000
"""Less than this is read by the thread that asks."""

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True)
class _Span:
    """Rows ``[start, end)`` of the sequence, of a run of ``length`` rows; ``rows`` is its place."""

    start: int
    end: int
    length: int
    rows: RowsInFile


@dataclass(frozen=True)
class _Read:
    """``count`` rows of ``rows`` from its row ``row`` on, to row ``at`` of a buffer."""

    rows: RowsInFile
    row: int
    count: int
    at: int


class DirectRows:
    """Answers ``rebuild``'s questions with buffers that ``fill`` reads the rows into."""

    def __init__(self, dtype_of: Callable[[int, Side], mx.Dtype | None]) -> None:
        """``dtype_of(layer, side)`` is the dtype of the cache; None keeps that of the file."""
        self._dtype_of = dtype_of
        self._spans: dict[tuple[int, str], list[_Span]] = {}
        self._files: list[MappedFiles] = []
        self._buffers: list[tuple[mx.array, list[_Read]]] = []
        self.num_bytes = 0

    def add(
        self, files: MappedFiles, runs: Iterable[tuple[Run, dict[str, Any]]], base: int, end: int
    ) -> bool:
        """Rows of a segment at token ``base``, none from token ``end`` on.

        ``runs`` come with their leaves. False where some have to be decoded. Raises what
        ``MappedFiles`` does.
        """
        self._files.append(files)
        for run, leaf in runs:
            rows = files.in_file(run, leaf)
            if rows is None:
                return False
            start, last = run.start + base, min(run.start + run.rows + base, end)
            self._spans.setdefault((run.layer, run.side), []).append(
                _Span(start, last, run.rows, rows)
            )
        return True

    def whole(self, wanted: Mapping[tuple[int, str], Sequence[tuple[int, int]]]) -> bool:
        """Whether every range of ``wanted`` is one run, and nearly all of that run.

        Then mx.load gives the same, without a second look at the memory.
        """
        for place, ranges in wanted.items():
            spans = {span.start: span for span in self._spans.get(place, [])}
            for start, end in ranges:
                span = spans.get(start)
                if span is None or span.end < end or span.length - (end - start) > MOST_SPARE_ROWS:
                    return False
        return True

    def fetch(self, layer: int, side: Side, start: int, end: int) -> mx.array:
        """``[H, n_pad, D]`` that is not filled yet. Raises DamagedData for rows that lack."""
        reads: list[_Read] = []
        at = start
        for span in sorted(self._spans.get((layer, side), []), key=_start):
            last = min(span.end, end)
            if span.start <= at < last:
                reads.append(_Read(span.rows, at - span.start, last - at, at - start))
                at = last
        if at < end or not reads:
            raise missing(f"leaf {layer} {side}: row {at}")
        shapes = {(one.rows.heads, one.rows.dim, one.rows.dtype) for one in reads}
        if len(shapes) != 1:
            raise StoreUnavailable(f"leaf {layer} {side}: tensors of several shapes")
        heads, dim, dtype = next(iter(shapes))
        buffer = mx.zeros((heads, end - start + SPARE_ROWS, dim), _WORDS[dtype.size])
        self._buffers.append((buffer, reads))
        rows = buffer if buffer.dtype == dtype else buffer.view(dtype)
        wanted = self._dtype_of(layer, side)
        return rows if wanted is None or dtype in (wanted, mx.uint8) else rows.astype(wanted)

    def fill(self) -> None:
        """Reads everything. Raises OSError, or StoreUnavailable for a file that ends early."""
        mx.eval([buffer for buffer, _ in self._buffers])
        for _, reads in self._buffers:
            self.num_bytes += sum(one.count * one.rows.row_bytes * one.rows.heads for one in reads)
        if self.num_bytes < _ALONE_BYTES:
            for buffer, reads in self._buffers:
                _fill(_memory(buffer), reads)
            return
        jobs: list[Future[None]] = []
        moved: list[mx.array] = []
        try:
            for buffer, reads in self._buffers:  # under CUDA a memory costs a copy: others are read
                between_pieces()
                jobs.append(_threads().submit(_fill, _memory(buffer), reads))
                if in_company() and len(jobs) - len(moved) > _MOST_AHEAD:
                    self._moved(jobs, moved)  # not all at once: a GPU that moves does nothing else
            while len(moved) < len(jobs):
                between_pieces()
                self._moved(jobs, moved)
            mx.eval(moved)
        finally:
            wait(jobs)  # none may still write when this gives up

    def _moved(self, jobs: Sequence[Future[None]], moved: list[mx.array]) -> None:
        """Waits for the next buffer to be read; under CUDA it is on its way to the GPU then."""
        number = len(moved)
        jobs[number].result()
        buffer, _ = self._buffers[number]
        moved.append(_on_its_way(buffer) if evaluation.on_cuda() else buffer)

    def close(self) -> None:
        """Closes the files."""
        for files in self._files:
            files.close()


def _start(span: _Span) -> int:
    return span.start


def _memory(buffer: mx.array) -> memoryview:
    memory = memoryview(buffer)  # type: ignore[arg-type]
    if memory.readonly or not memory.c_contiguous:
        raise StoreUnavailable("MLX gives no writable memory of its arrays")
    return memory.cast("B")


def _on_its_way(buffer: mx.array) -> mx.array:
    """A reduction over ``buffer``, begun: the GPU's first use brings its pages to the GPU.

    Beside the reading of the others: 268 MB took an H200 74 ms so, 77 to 98 ms one after the other.
    """
    used = buffer.max()
    mx.async_eval(used)  # type: ignore[no-untyped-call]
    return used


def _fill(memory: memoryview, reads: Sequence[_Read]) -> None:
    heads = reads[0].rows.heads
    row_bytes = reads[0].rows.row_bytes
    padded = memory.nbytes // (heads * row_bytes)
    for one in reads:
        for head in range(heads):
            begin = (head * padded + one.at) * row_bytes
            into = memory[begin : begin + one.count * row_bytes]
            _read(one.rows.file, into, one.rows.offset_of(head, one.row))


def _read(file: int, into: memoryview, offset: int) -> None:
    while into:
        count = os.preadv(file, [into], offset)
        if not count:
            raise StoreUnavailable("a file of the store ends before its rows do")
        into, offset = into[count:], offset + count


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "pion-read")


@cache
def usable() -> bool:
    """Whether memory that is written from here is what the device computes with."""
    probe = mx.zeros((64,), mx.uint16)
    mx.eval(probe)
    memory = memoryview(probe)  # type: ignore[arg-type]
    if memory.readonly or not memory.c_contiguous:
        return False
    memory.cast("B")[:] = bytes(n if k == 0 else 0 for n in range(64) for k in (0, 1))
    return bool(mx.array_equal(probe, mx.arange(64, dtype=mx.uint16)).item())
