"""Sealing: into the right file, without a look at what does not move, and nothing is cut short."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pion_vllm_mlx.server.commands.vstore_fetch import Wanted, layer_chunks
from pion_vllm_mlx.server.outbound import Stream
from pion_vllm_mlx.server.store import sealing, segments
from pion_vllm_mlx.server.store.files import FileHandle
from pion_vllm_mlx.server.store.index import InSegment, LayerRows
from pion_vllm_mlx.server.store.sealing import begin_seal, seal_bytes
from pion_vllm_mlx.server.store.segment import Segment
from tests.recovery.driving import Driver, plain
from tests.recovery.material import agrees, noise, open_sealed, register, rows
from tests.recovery.test_cut_power import RUN_ROWS, committed

#: rows of 128 bytes: a run that rides in the log, and one that does not.
RIDES, LIES = 20, 64


def _opening_others_first(
    driver: Driver, real: Callable[..., Any], others: list[Path]
) -> Callable[..., Any]:
    """``real``, before which other files are used until none of the store's is kept open."""
    held: list[FileHandle] = []

    def call(*args: Any) -> Any:
        driver.store.segments.files._limit = 1
        first, *rest = others
        driver.store.segments.files.add(FileHandle(first, 2))
        held.extend(FileHandle(path, 2) for path in rest)
        return real(*args)

    return call


@pytest.mark.parametrize(
    ("module", "call"), [(segments, "pwritev_all"), (sealing, "pread_exactly")]
)
def test_rows_go_into_their_file_whatever_else_is_opened_in_that_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    others = [folder / f"other{number}" for number in range(3)]
    for path in others:
        path.write_bytes(b"others' bytes")
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        for layer in (0, 1):
            driver.ask(*rows("a_pk", layer, 0, RIDES))
        driver.ask(*rows("a_pv", 0, 0, LIES))
        wrapped = _opening_others_first(driver, getattr(module, call), others)
        monkeypatch.setattr(module, call, wrapped)
        driver.ask(*rows("a_pk", 0, RIDES, LIES))
        driver.ask("KV.PREFIX.MAP", "a")
        monkeypatch.undo()
        assert {path.read_bytes() for path in others} == {b"others' bytes"}
        assert agrees(driver, "a") == 4
        assert driver.store.counters.damaged == 0 and open_sealed(driver)


def test_rows_whose_end_is_not_flushed_outlive_the_sealing_of_their_file(folder: Path) -> None:
    with committed(folder) as driver:
        point = driver.ask("V.SNAPSHOT", "a_pk")
        driver.ask(*rows("a_pk", 0, RUN_ROWS, RUN_ROWS))
        driver.ask("KV.PREFIX.COMMIT")
        expected = driver.content()
        driver.ask("V.RESTORE", "a_pk", point)
        driver.ask("KV.PREFIX.MAP", "a")
        driver.store.segments.flush()  # before the log, as each flush does
    with Driver(folder) as driver:
        assert not driver.store.replayed.notes
        assert driver.content() == expected


def test_a_reply_under_way_outlives_the_sealing_of_rows_that_were_taken_back(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, LIES))
        point = driver.ask("V.SNAPSHOT", "a_pk")
        driver.ask(*rows("a_pk", 0, LIES, LIES))
        layer = driver.store.state.sessions[b"a_pk"].layers[0]
        wanted = Wanted(LIES, 2 * LIES, "STORED", head_major=True)
        chunks = Stream(list(layer_chunks(layer.as_now(LIES, 2 * LIES), wanted)))
        driver.ask("V.RESTORE", "a_pk", point)
        driver.ask("KV.PREFIX.MAP", "a")
        assert plain(chunks) == noise(("a_pk", 0, LIES, LIES), LIES * 128)
        assert open_sealed(driver) == 1 and agrees(driver, "a") == 1


def test_what_no_record_has_named_is_cut_off(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, LIES))
        (segment,) = driver.store.segments.segments.values()
        with segment.path.open("ab") as file:
            file.write(bytes(100_000))
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.MAP", "a")
        assert segment.path.stat().st_size < 100_000
        assert open_sealed(driver) == 1 and agrees(driver, "a") == 1


def _never(*_: object) -> NoReturn:
    raise AssertionError("looked at what need not be looked at")


def test_only_what_rides_in_the_log_is_looked_at_to_move_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, RIDES))
        driver.ask(*rows("a_pk", 1, 0, LIES))
        state, files = driver.store.state, driver.store.segments
        with monkeypatch.context() as patched:
            patched.setattr(LayerRows, "runs", _never)
            assert seal_bytes(state, files, [b"a"], sys.maxsize) > RIDES * 128
            assert len(begin_seal(state, files, b"a").mover.runs) == 1
        driver.ask("KV.PREFIX.MAP", "a")
        assert not state.inline_runs and not state.inline_groups()
        assert agrees(driver, "a") == 2


def test_runs_that_move_together_lie_in_the_order_of_their_rows(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        for start in (10, 0, 20):
            for layer in (1, 0):
                for sid in ("a_pv", "a_pk"):
                    driver.ask(*rows(sid, layer, start, 2))
        driver.ask("KV.PREFIX.MAP", "a")
        assert agrees(driver, "a") == 12
        offsets = []
        for side in driver.store.state.sides(b"a"):
            for _, layer in sorted(side.layers.items()):
                places = [run.place for run in layer.runs()]
                offsets += [place.offset for place in places if isinstance(place, InSegment)]
        assert len(offsets) == 12 and offsets == sorted(offsets)


class _Unseen(dict[str, Segment]):
    """A table in which a segment is found by its name alone."""

    values = items = __iter__ = _never  # type: ignore[assignment]


def test_a_flush_looks_only_at_segments_that_were_written_to(folder: Path) -> None:
    with Driver(folder) as driver:
        for name in "ab":
            driver.ask(*register(name))
            driver.ask(*rows(f"{name}_pk", 0, 0, LIES))
        files = driver.store.segments
        driver.ask("KV.PREFIX.COMMIT")
        assert not driver.store.flush_soon()
        files.segments = _Unseen(files.segments)
        driver.ask(*rows("a_pk", 0, LIES, LIES))
        assert [segment.group for segment in files.dirty()] == [b"a"]
        assert driver.store.flush_soon()
        driver.ask("KV.PREFIX.COMMIT")
        assert not files.dirty() and not driver.store.flush_soon()
        driver.ask(*rows("b_pk", 0, LIES, LIES))
        driver.ask("KV.PREFIX.DROP", "b")
        assert not files._due
