"""A log that ends anywhere: what was acknowledged before the cut is there, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion_vllm_mlx.server.store.findings import Kind
from tests.recovery.broken import SSM_WAL, VSTORE_WAL, Copies, boundaries, history
from tests.recovery.driving import Content, Driver, Word
from tests.recovery.every_record import everything_of, fill
from tests.recovery.material import COMPLETION_LAYER, register, rows, state

WIDTH = 8
Script = tuple[tuple[Word, ...], ...]

SHORT_ROWS: Script = (
    register("n", 1, WIDTH),
    state("n", 0, 20),
    rows("n_pk", 0, 0, 2, WIDTH),
    rows("n_pv", 0, 0, 2, WIDTH),
    rows("n_pk", 0, 1, 3, WIDTH),
)
SEALED_THEN_DROPPED: Script = (
    *SHORT_ROWS,
    ("KV.PREFIX.MAP", "n"),
    rows("n_pk", 0, 9, 1, WIDTH),
    ("V.DROP", "n_pv"),
)
LONG_ROWS: Script = (
    *SHORT_ROWS,
    *(rows("n_pk", 0, start, 4200, WIDTH) for start in (4, 4200, 4204)),
)
STATES: Script = (
    *SHORT_ROWS,
    state("n", 1, 66_000),
    state("n", COMPLETION_LAYER, 30),
    ("SSM.PREFIX.DROP", "n", 0),
    state("n@2", 0, 30),
)
MORE: Script = (
    register("later", 1, WIDTH),
    rows("later_pk", 0, 0, 3, WIDTH),
    state("later", 0, 40),
)


def _run(folder: Path, script: Script) -> list[Content]:
    """What the store held after each command."""
    contents = []
    with Driver(folder) as driver:
        for words in script:
            driver.ask(*words)
            contents.append(driver.content())
    return contents


def _goes_on(folder: Path, driver: Driver) -> None:
    """More can be stored, and the next start has all of it."""
    for words in MORE:
        driver.ask(*words)
    extended = driver.content()
    driver.crash()
    with Driver(folder) as again:
        assert again.content() == extended
        assert again.store.replayed.notes == []


@pytest.mark.parametrize(
    ("log", "script"),
    [
        (VSTORE_WAL, SHORT_ROWS),
        (VSTORE_WAL, SEALED_THEN_DROPPED),
        (VSTORE_WAL, LONG_ROWS),
        (SSM_WAL, STATES),
    ],
    ids=["short rows", "sealed then dropped", "long rows", "states"],
)
def test_a_log_cut_at_every_byte_of_its_last_three_records_holds_what_came_before(
    folder: Path, log: str, script: Script
) -> None:
    live = _run(folder, script)
    copies = Copies(folder)
    ends = boundaries(folder / log)
    expected = history(copies, log)
    assert expected[-1] == live[-1]
    assert len({repr(content) for content in expected[-4:]}) >= 3, "the records must differ"
    for size in range(ends[-4], ends[-1] + 1):
        complete = max(index for index, end in enumerate(ends) if end <= size)
        with Driver(copies.cut(log, size)) as driver:
            assert driver.content() == expected[complete], size
            torn = size not in ends
            assert any(note.kind is Kind.TORN for note in driver.store.replayed.notes) == torn
            if not torn or size % 5 == 0:
                _goes_on(copies.folder, driver)


@pytest.mark.parametrize("log", [VSTORE_WAL, SSM_WAL])
def test_a_log_of_every_kind_of_record_cut_at_every_byte_holds_what_came_before(
    folder: Path, log: str
) -> None:
    whole = fill(folder)
    copies = Copies(folder)
    ends = boundaries(folder / log)
    expected = [everything_of(copies.cut(log, end)) for end in ends]
    assert expected[-1] == whole
    for size in range(ends[-1] + 1):
        complete = max((index for index, end in enumerate(ends) if end <= size), default=0)
        assert everything_of(copies.cut(log, size)) == expected[complete], size


def test_each_log_alone_cut_after_a_record_is_what_the_store_held_then(folder: Path) -> None:
    script = [words for words in LONG_ROWS if words[0] != "SSM.PREFIX.STORE"]
    live = _run(folder, tuple(script))
    ends = history(Copies(folder), VSTORE_WAL)
    # REGISTER writes two records; every other command here writes one
    assert ends[2:] == live


@pytest.mark.parametrize("log", [VSTORE_WAL, SSM_WAL])
def test_after_any_torn_end_appending_and_restarting_works(folder: Path, log: str) -> None:
    _run(folder, SHORT_ROWS)
    copies = Copies(folder)
    for size in range(0, (folder / log).stat().st_size, 9):
        with Driver(copies.cut(log, size)) as driver:
            _goes_on(copies.folder, driver)
