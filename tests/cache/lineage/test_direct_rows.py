"""Rows of a stored prefix are read into place: those that are wanted, all of them, or none."""

from __future__ import annotations

import contextvars
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_vllm_mlx.cache import direct_rows, evaluation
from pion_vllm_mlx.cache import pace as pace_module
from pion_vllm_mlx.cache.direct_rows import SPARE_ROWS, DirectRows
from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.cache.mapped_files import MappedFiles, RowsInFile
from pion_vllm_mlx.cache.pace import Pace, keep_pace
from pion_vllm_mlx.errors import DamagedData, StoreUnavailable
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import Engine, prompt
from tests.models import tiny_model

HEADS, PADDED, DIM = 3, 40, 8


class Placed(MappedFiles):
    """One tensor, of whatever run is asked for."""

    def __init__(self, rows: RowsInFile) -> None:
        self.place = rows

    def in_file(self, run: Any, leaf: dict[str, Any]) -> RowsInFile:
        return self.place

    def close(self) -> None:
        os.close(self.place.file)


class Run:
    """What DirectRows looks at of a run."""

    def __init__(self, start: int, rows: int) -> None:
        self.layer, self.side, self.start, self.rows = 0, "k", start, rows


def placed(path: Path, table: np.ndarray[Any, Any], first: int = 0) -> Placed:
    path.write_bytes(b"head" + table.tobytes())
    file = os.open(path, os.O_RDONLY)
    return Placed(RowsInFile(file, 4, mx.float16, HEADS, table.shape[1], DIM, first))


def random_table(rows: int = PADDED) -> np.ndarray[Any, Any]:
    return np.random.default_rng().normal(size=(HEADS, rows, DIM)).astype(np.float16)


def kept(dtype: mx.Dtype | None = None) -> DirectRows:
    return DirectRows(lambda layer, side: dtype)


@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_several_files_stand_one_behind_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(direct_rows, "_ALONE_BYTES", 1 << 30 if alone else 0)
    a, b = random_table(), random_table(25)
    rows = kept()
    assert rows.add(placed(tmp_path / "a", a, first=5), [(Run(0, 30), {})], 0, 20)  # type: ignore[list-item]
    assert rows.add(placed(tmp_path / "b", b), [(Run(0, 25), {})], 20, 41)  # type: ignore[list-item]
    found = rows.fetch(0, "k", 2, 41)
    rows.fill()
    assert found.shape == (HEADS, 39 + SPARE_ROWS, DIM)
    wanted = np.concatenate([a[:, 7:25], b[:, :21]], axis=1)
    assert np.array_equal(np.array(found[:, :39]), wanted)
    assert not np.array(found[:, 39:]).any()
    assert rows.num_bytes == wanted.nbytes
    rows.close()


@pytest.mark.parametrize("generating", [False, True], ids=["alone", "in company"])
def test_rows_move_to_a_gpu_while_others_are_read_where_somebody_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generating: bool
) -> None:
    """Alone all are read at once, which takes the least time."""
    monkeypatch.setattr(direct_rows, "_ALONE_BYTES", 0)
    monkeypatch.setattr(evaluation, "on_cuda", lambda: True)
    order: list[str] = []

    def noted(name: str) -> None:
        original = vars(direct_rows)[name]

        def calling(buffer: mx.array) -> Any:
            order.append(name)
            return original(buffer)

        monkeypatch.setattr(direct_rows, name, calling)

    noted("_memory")
    noted("_on_its_way")
    table, count = random_table(), 12
    rows = kept()
    assert rows.add(placed(tmp_path / "a", table), [(Run(0, PADDED), {})], 0, PADDED)  # type: ignore[list-item]
    found = [rows.fetch(0, "k", 0, PADDED) for _ in range(count)]
    pace = Pace()
    if generating:
        pace.step()
        monkeypatch.setattr(pace_module, "IDLE_SECONDS", float("inf"))
        monkeypatch.setattr(pace_module, "WORKED_SECONDS", float("inf"))

    def fill() -> None:
        keep_pace(pace)
        rows.fill()

    contextvars.copy_context().run(fill)
    assert all(np.array_equal(np.array(one[:, :PADDED]), table) for one in found)
    ahead = [
        order[:at].count("_memory") - order[:at].count("_on_its_way") for at in range(len(order))
    ]
    assert len(order) == 2 * count
    assert max(ahead) == (direct_rows._MOST_AHEAD + 1 if generating else count)
    rows.close()


def test_rows_come_in_the_dtype_of_the_cache(tmp_path: Path) -> None:
    a = random_table()
    rows = kept(mx.float32)
    rows.add(placed(tmp_path / "a", a), [(Run(0, PADDED), {})], 0, PADDED)  # type: ignore[list-item]
    found = rows.fetch(0, "k", 0, PADDED)
    rows.fill()
    assert found.dtype == mx.float32
    assert np.array_equal(np.array(found[:, :PADDED]), a.astype(np.float32))
    rows.close()


def test_a_file_that_ends_early_is_said_so(tmp_path: Path) -> None:
    rows = kept()
    files = placed(tmp_path / "a", random_table())
    os.truncate(tmp_path / "a", 4 + 2 * PADDED * DIM * 2)
    rows.add(files, [(Run(0, PADDED), {})], 0, PADDED)  # type: ignore[list-item]
    rows.fetch(0, "k", 0, PADDED)
    with pytest.raises(StoreUnavailable, match="ends before its rows"):
        rows.fill()
    rows.close()


def test_rows_that_lack_are_named(tmp_path: Path) -> None:
    rows = kept()
    rows.add(placed(tmp_path / "a", random_table()), [(Run(0, 10), {})], 0, 10)  # type: ignore[list-item]
    with pytest.raises(DamagedData, match="row 10"):
        rows.fetch(0, "k", 0, 11)
    rows.close()


def test_what_is_written_is_what_the_device_computes_with() -> None:
    assert direct_rows.usable()


def rows_of(caches: list[Any], count: int) -> list[bytes]:
    return [np.array(array[:, :, :count]).tobytes() for array in cache_arrays(caches)]


def branched(store: LineageStore, model: Any) -> tuple[list[int], list[int]]:
    """A long prompt, and one that leaves it early; both are stored."""
    long = prompt(1_400, 1)
    short = [*long[:100], *prompt(150, 2)]
    engine = Engine(model, store)
    for ids in (long, short):
        engine.turn(ids)
        assert store.flush(30)
    return long, short


def test_a_branch_reads_no_more_of_the_trunk_than_it_shares(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model)
    _, short = branched(store, model)
    restored = store.restore(store.match([*short, 1]))
    assert restored is not None and restored.lane == "mapped"
    assert restored.length == len(short)
    row = sum(a.shape[1] * a.shape[3] * a.itemsize for a in cache_arrays(restored.caches))
    assert restored.num_bytes == row * len(short)


def test_direct_rows_equal_those_of_the_other_lanes(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    store = opened(model)
    _, short = branched(store, model)
    match = store.match([*short, 1])
    direct = store.restore(match)
    monkeypatch.setattr(direct_rows, "usable", lambda: False)
    others = store.restore(match)
    assert direct is not None and others is not None
    assert direct.length == others.length == len(short)
    assert rows_of(direct.caches, len(short)) == rows_of(others.caches, len(short))
    assert "lane_failures" not in store.stats()


def test_a_restore_that_cannot_be_read_directly_takes_another_lane(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    store = opened(model)
    _, short = branched(store, model)

    def failing(file: int, into: memoryview, offset: int) -> None:
        raise OSError("cannot be read")

    monkeypatch.setattr(direct_rows, "_read", failing)
    restored = store.restore(store.match([*short, 1]))
    assert restored is not None and restored.length == len(short)
    assert store.stats()["lane_failures"] == 1
