"""Prefixes of equal rows, and what has to be true of a store that keeps them once."""

from __future__ import annotations

from typing import Any

from pion_vllm_mlx.server.store.index import InSegment
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from tests.recovery.driving import Content, Driver, Word
from tests.recovery.material import noise, open_sealed, register

WIDE, COUNT = 1024, 64
#: 64 rows of 2 KB, both sides, two layers.
PREFIX_BYTES = 4 * COUNT * WIDE * 2
SIDES = ("_pk", "_pv")
#: block tables, headers and short runs
SLACK = 80_000


def put(sid: str, layer: int, start: int, count: int, blob: bytes) -> tuple[Word, ...]:
    place: tuple[Word, ...] = ("V.STOREBATCH", sid, layer, start, count, blob)
    return (*place, "FMT", "STORED", "LAYOUT", "HND")


def block(side: str, layer: int, start: int, count: int, seed: str = "same") -> bytes:
    return noise((seed, side, layer, start, count), count * WIDE * 2)


def prefix(driver: Driver, name: str, seed: str = "same", start: int = 0) -> None:
    """A prefix of two layers whose rows follow from the seed, not from the name."""
    if not start:
        driver.ask(*register(name, 2, WIDE))
    for layer in range(2):
        for side in SIDES:
            blob = block(side, layer, start, COUNT, seed)
            driver.ask(*put(name + side, layer, start, COUNT, blob))


def share(driver: Driver, limit: int = 1000) -> int:
    """Reclaim and share until there is nothing to do; how many steps did something."""
    reclaimer, busy = Reclaimer(driver.store), 0
    for _ in range(limit):
        did = driver.loop.run_until_complete(reclaimer.step())
        busy += did
        # a step that finds nothing may only have run out of its time
        if not did and not driver.store.state.untidy and not driver.store.state.unshared:
            return busy
    raise AssertionError("never at rest")


def disk(driver: Driver) -> int:
    return driver.store.space.disk_bytes()


def places(driver: Driver, name: str) -> set[tuple[str, int]]:
    """Where the rows of a namespace lie."""
    found = set()
    for side in SIDES:
        for run in driver.store.state.sessions[(name + side).encode()].runs():
            assert isinstance(run.place, InSegment)
            found.add((run.place.segment.name, run.place.offset))
    return found


def files(driver: Driver) -> set[str]:
    return {path.name for path in driver.store.segments.path.iterdir()}


def sound(driver: Driver) -> None:
    """What is counted is what is there, and no file is left over."""
    segments = driver.store.segments.segments
    assert files(driver) == {segment.path.name for segment in segments.values()}
    uses: dict[str, dict[bytes, int]] = {name: {} for name in segments}
    for session in driver.store.state.sessions.values():
        group = session.sid[:-3]
        for run in session.runs():
            if isinstance(run.place, InSegment):
                mine = uses[run.place.segment.name]
                mine[group] = mine.get(group, 0) + 1
    for sid, layers in driver.store.state.states.items():
        for blob in layers.values():
            if isinstance(blob.place, InSegment):
                mine = uses[blob.place.segment.name]
                mine[sid] = mine.get(sid, 0) + 1
    for name, segment in segments.items():
        assert segment.uses == sum(uses[name].values())
        assert set(segment.users()) == set(uses[name])
    open_sealed(driver)


def rows_of(content: Content, name: str) -> dict[str, Any]:
    """What a namespace holds, without its name."""
    return {
        f"{kind}{sid[len(name) :]!r}{layer}": value
        for (kind, sid, layer), value in content.items()
        if sid.startswith(name.encode())
    }


def logical_bytes(driver: Driver) -> int:
    return sum(session.row_bytes() for session in driver.store.state.sessions.values())
