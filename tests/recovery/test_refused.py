"""A command that the disk refuses has changed nothing: nobody's rows, states, pins or deadlines.

Each is swept: its first call of the system fails, its second, … until none is left to fail.
"""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.index import group_of
from tests.recovery.driving import Content, Driver, Options, Word
from tests.recovery.faults import Faults, failing
from tests.recovery.material import noise, register, rows, state, store_all

BLOCKS: tuple[Word, ...] = ("BLOCKS", 64, 2, struct.pack("<QQ", 1, 2))
Words = tuple[Word, ...]
#: stands for the rollback point that is there.
POINT = "point"

PLAIN: dict[str, Words] = {
    "create": ("V.CREATE", "new", 64, "VQUANT", "fp16"),
    "register": register("new"),
    "register with blocks": (*register("new"), *BLOCKS),
    "blocks": (*register("a"), *BLOCKS),
    "short rows": rows("a_pk", 0, 13, 4),
    "long rows": rows("a_pk", 1, 3, 700),
    "converted rows": ("V.STOREBATCH", "a_pk", 1, 0, 2, noise(1, 512)),
    "short state": state("a", 5, 100),
    "state in another's place": state("a", 0, 200, salt=1),
    "long state": state("a", 5, 100_000),
    "pin": ("KV.PREFIX.PIN", "a"),
    "unpin": ("KV.PREFIX.UNPIN", "b"),
    "expire": ("KV.PREFIX.EXPIRE", "a", 1000),
    "expire never": ("KV.PREFIX.EXPIRE", "b", -1),
    "restore": ("V.RESTORE", "a_pk", POINT),
    "drop": ("KV.PREFIX.DROP", "a", "b"),
    "drop a side": ("V.DROP", "a_pk"),
    "drop states": ("SSM.PREFIX.DROP", "a"),
}
#: these make another prefix leave.
FULL_TABLE = Options(max_sessions=4)
EVICTING: dict[str, Words] = {
    "register": register("new"),
    "register with blocks": (*register("new"), *BLOCKS),
    "create": ("V.CREATE", "new", 64),
}
ALWAYS: dict[str, Words] = {
    "register": register("new"),
    "long rows": rows("a_pk", 1, 3, 700),
    "long state": state("a", 5, 100_000),
    "restore": ("V.RESTORE", "a_pk", POINT),
}


def _filled(place: Path, options: Options | None = None) -> None:
    """Two prefixes whose files were never flushed, b pinned and with a deadline."""
    place.mkdir()
    with Driver(place, options) as driver:
        store_all(driver, "a")
        store_all(driver, "b", big=False)
        driver.ask("KV.PREFIX.PIN", "b")
        driver.ask("KV.PREFIX.EXPIRE", "b", 100_000)


def _opened(place: Path, options: Options, words: Words) -> tuple[Driver, Words]:
    """A store whose a_pk has grown since a rollback point, and the words with that point."""
    driver = Driver(place, options)
    point = driver.ask("V.SNAPSHOT", "a_pk")
    driver.ask(*rows("a_pk", 0, 300, 4))
    return driver, tuple(point if word is POINT else word for word in words)


def _everything(driver: Driver) -> Content:
    """What the store holds, and what is known about its sessions beside their rows."""
    found = driver.content()
    for sid, session in driver.store.state.sessions.items():
        blocks = session.blocks and bytes(session.blocks.blob)
        found["kept", sid, -1] = (session.pinned, session.deadline_ms > 0, blocks)
    return found


def _restarted(place: Path, options: Options) -> Content:
    with Driver(place, options) as driver:
        return _everything(driver)


def _crashed_now(place: Path, options: Options) -> Content:
    copy = place.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place, copy)
    return _restarted(copy, options)


def _outcome(driver: Driver, words: Words, fail_at: int, forever: bool) -> tuple[Faults, str]:
    """Which calls failed, and the refusal, empty where there was none."""
    with failing(fail_at, forever) as faults:
        try:
            driver.ask(*words)
        except CommandError as error:
            return faults, error.sentence
    return faults, ""


def _is_between(crashed: Content, before: Content, done: Content) -> bool:
    """Whether a start found nothing but what was there or was asked for.

    A log that refuses to be cut, too, keeps what it refused until it can be.
    """
    keys = [key for key in before | done | crashed if key[0] != "kept"]
    return all(crashed.get(key) in (before.get(key), done.get(key)) for key in keys)


def _sweep(folder: Path, words: Words, options: Options, forever: bool) -> int:
    """Refuse the command at each of its calls; how often it was refused."""
    _filled(folder / "filled", replace(options, max_sessions=256))
    shutil.copytree(folder / "filled", folder / "done")
    driver, asked = _opened(folder / "done", options, words)
    with driver:
        driver.ask(*asked)
        done, evicted = _everything(driver), driver.store.space.evictions
    refusals = 0
    for fail_at in range(60):
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "filled", place)
        driver, asked = _opened(place, options, words)
        with driver:
            before = _everything(driver)
            faults, refusal = _outcome(driver, asked, fail_at, forever)
            where, found = (fail_at, faults.failed), _everything(driver)
            refused = bool(refusal) and "stored, but not flushed" not in refusal
            refusals += refused
            assert faults.failed or not refusal, where
            assert found == (before if refused else done), where
            assert driver.store.space.evictions == (0 if refused else evicted), where
            crashed = _crashed_now(place, options)
            if not forever:
                assert crashed == found, where
            assert _is_between(crashed, before, done), where
            driver.ask(*register("later"))
            driver.ask(*rows("later_pk", 0, 0, 4))
            extended = _everything(driver)
        assert _restarted(place, options) == extended, where
        if not faults.failed:
            return refusals
    raise AssertionError("never got through")


@pytest.mark.parametrize("forever", [False, True], ids=["one fault", "a full disk"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_refused_command_changes_nothing(folder: Path, name: str, forever: bool) -> None:
    # what only drops has room that is kept for it, if the disk fails once
    drops = name.startswith("drop") and not forever
    assert (_sweep(folder, PLAIN[name], Options(), forever) == 0) == drops


@pytest.mark.parametrize("forever", [False, True], ids=["one fault", "a full disk"])
@pytest.mark.parametrize("name", EVICTING)
def test_a_refused_command_makes_nobody_leave_for_it(
    folder: Path, name: str, forever: bool
) -> None:
    assert _sweep(folder, EVICTING[name], FULL_TABLE, forever) >= 2


@pytest.mark.parametrize("name", ALWAYS)
def test_so_it_is_where_every_command_is_flushed(folder: Path, name: str) -> None:
    options = Options(appendfsync="always", max_sessions=4)
    assert _sweep(folder, ALWAYS[name], options, False) >= 1


def test_a_refused_store_of_a_tenant_past_its_quota_makes_nobody_leave_for_it(folder: Path) -> None:
    quota = Options(quota=300_000)
    for name, words in (("rows", rows("b_pk", 1, 3, 700)), ("state", state("b", 5, 100_000))):
        (folder / name).mkdir()
        assert _sweep(folder / name, words, quota, False) >= 2
        with Driver(folder / name / "done", quota) as driver:
            assert {group_of(sid) for sid in driver.store.state.sessions} == {b"t:b"}


@pytest.mark.parametrize("forever", [False, True], ids=["one fault", "a full disk"])
def test_who_left_for_a_store_that_was_refused_then_left_as_a_whole_and_counts_once(
    folder: Path, forever: bool
) -> None:
    _filled(folder / "filled")
    with Driver(folder / "filled") as driver:
        used, before = driver.store.space.used_bytes(), _everything(driver)
    options = Options(disk_budget=used + 100_000)
    without_a = {key: value for key, value in before.items() if key[1].startswith(b"b")}
    outcomes: set[tuple[bool, bool]] = set()
    for fail_at in range(60):
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "filled", place)
        with Driver(place, options) as driver:
            faults, refusal = _outcome(driver, rows("b_pk", 1, 9, 900), fail_at, forever)
            where, found = (fail_at, faults.failed), _everything(driver)
            evictions = driver.store.space.evictions
            if refusal:
                assert found == (without_a if evictions else before), where
            outcomes.add((bool(refusal), bool(evictions)))
            assert evictions == (0 if (found.keys() & before.keys()) == before.keys() else 2)
            if not forever:
                assert _crashed_now(place, options) == found, where
            assert driver.ask("KV.PREFIX.LOOKUP", "a") == ("MISS" if evictions else "HIT")
        if not faults.failed:
            # one that only fails once has room for who leaves
            assert outcomes - {(True, False)} == {(True, True), (False, True)}
            assert ((True, False) in outcomes) == forever
            return
    raise AssertionError("never got through")
