"""The counters of KV.PREFIX.INFO say what a walk over everything would."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.index import KEY_SUFFIX
from pion_vllm_mlx.server.store.totals import Totals
from tests.recovery.driving import Driver, Options, Word

WIDTH = 4
NAMES = ("a", "b", "a_pk", "c_pv", "d")
OPTIONS = Options(max_sessions=9)


def counted(driver: Driver) -> dict[str, int]:
    """What INFO says."""
    pairs = (line.split(":") for line in driver.ask("KV.PREFIX.INFO").split())
    return {name: int(value) for name, value in pairs}


def walked(driver: Driver) -> dict[str, int]:
    """The same by looking at every session and every file."""
    state = driver.store.state
    namespaces = state.namespaces()
    firsts = [state.sessions[name + KEY_SUFFIX].layers.get(0) for name in namespaces]
    files = driver.store.paths.segments.iterdir()
    return {
        "registered_prefixes": len(namespaces),
        "total_prefix_tokens": sum(first.count for first in firsts if first),
        "vstore_bytes": sum(session.row_bytes() for session in state.sessions.values()),
        "vstore_disk_bytes": sum(file.stat().st_blocks * 512 for file in files),
    }


def step(driver: Driver, dice: random.Random, points: list[tuple[str, int]]) -> None:
    """One command drawn at random; a refusal is as good as any other."""
    name = dice.choice(NAMES)
    sid = name + dice.choice(("_pk", "_pv", ""))
    rows = dice.choice((1, 3, 9000))
    words: tuple[Word, ...] = dice.choice(
        [
            *[("KV.PREFIX.REGISTER", name, WIDTH, "fp16")] * 2,
            ("V.CREATE", sid, WIDTH, "VQUANT", dice.choice(("fp16", "int8"))),
            *[("V.STOREBATCH", sid, dice.randrange(3), dice.randrange(9), rows, bytes(16 * rows))]
            * 6,
            ("V.SNAPSHOT", sid),
            ("KV.PREFIX.DROP", name),
            ("V.DROP", sid),
            ("KV.PREFIX.SAVE",),
            ("KV.PREFIX.EXPIRE", name, 1000),
            *[("V.RESTORE", *point) for point in points[-1:]],
        ]
    )
    try:
        answer = driver.ask(*words)
    except CommandError:
        return
    if words[0] == "V.SNAPSHOT":
        points.append((sid, answer))


@pytest.mark.parametrize("seed", range(4))
def test_after_every_command_the_counters_say_what_a_walk_does(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    seen: set[int] = set()
    for _ in range(3):
        with Driver(folder, OPTIONS) as driver:
            points: list[tuple[str, int]] = []
            for _ in range(60):
                expected = walked(driver)
                found = counted(driver)
                assert {name: found[name] for name in expected} == expected
                seen.add(expected["total_prefix_tokens"])
                step(driver, dice, points)
    assert len(seen) > 2


def test_names_of_what_came_and_went_do_not_pile_up_while_nobody_asks(folder: Path) -> None:
    with Driver(folder) as driver:
        counts = Totals(driver.store.state)
        for number in range(20_000):
            counts.changed([b"gone%d_pk" % number])
        assert len(counts._changed) < 5_000 and not any(counts.sums())
