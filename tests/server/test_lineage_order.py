"""Who leaves first where lineages are stored: what their index says was used least recently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.server.lineage_order import MOST_ANCHORS
from pion_vllm_mlx.server.store.eviction import Shortage
from pion_vllm_mlx.server.store.index import group_of
from tests.recovery.driving import Driver, Options
from tests.recovery.material import register, rows


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with Driver(tmp_path, Options(max_sessions=128)) as one:
        yield one


def leaving(driver: Driver) -> list[str]:
    """The namespaces in the order in which they leave."""
    victims = driver.store.space.policy.victims(driver.store.state, Shortage.BYTES)
    return list(dict.fromkeys(group_of(session.sid).decode() for session in victims))


def segment(driver: Driver, number: int, used: float, up: str = "", mid: str = "a") -> None:
    """A segment of a lineage with a row, as its client shows it."""
    driver.ask(*register(f"pps{mid}s{number}"))
    driver.ask(*rows(f"pps{mid}s{number}_pk", 0, 0, 4))
    driver.ask("HSET", f"pps:{mid}:seg:{number}", "up", up)
    driver.ask("ZADD", "pps:lru", used, f"{mid}:{number}")


def anchor(driver: Driver, number: int, used: float, mid: str = "a") -> None:
    driver.ask("ZADD", "pps:anchors", used, f"{mid}:{number}")


def test_segments_leave_as_their_index_tells_and_a_leaf_before_what_it_stands_on(
    driver: Driver,
) -> None:
    segment(driver, 1, used=9)
    segment(driver, 2, used=5, up="1:0")
    segment(driver, 3, used=9, up="1:0")
    segment(driver, 4, used=7, up="1:0")
    assert leaving(driver) == ["ppsas2", "ppsas4", "ppsas3", "ppsas1"]


def test_the_order_is_the_same_after_a_restart_without_a_snapshot(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for number, used in ((1, 9), (2, 5), (3, 9), (4, 7)):
            segment(driver, number, used)
        keys = {f"a:{number}": used for number, used in ((1, 9), (2, 5), (3, 9), (4, 7))}
    with Driver(tmp_path) as driver:  # its keys are the test's own
        for member, used in keys.items():
            driver.ask("ZADD", "pps:lru", used, member)
        assert leaving(driver) == ["ppsas2", "ppsas4", "ppsas3", "ppsas1"]


def test_others_stay_where_their_own_use_has_them(driver: Driver) -> None:
    driver.ask(*register("first"))
    segment(driver, 1, used=9)
    driver.ask(*register("second"))
    segment(driver, 2, used=5)
    assert leaving(driver) == ["first", "ppsas2", "second", "ppsas1"]


def test_what_no_index_names_leaves_first_and_what_is_being_stored_when_it_began(
    driver: Driver,
) -> None:
    segment(driver, 1, used=5)
    segment(driver, 2, used=9)
    driver.ask(*register("ppsas3"))
    driver.ask("ZADD", "pps:a:loose", 7, "ppsas3")
    driver.ask(*register("ppsas4"))
    assert leaving(driver) == ["ppsas4", "ppsas1", "ppsas3", "ppsas2"]


def test_anchors_and_what_they_stand_on_leave_after_the_others_and_before_pins(
    driver: Driver,
) -> None:
    segment(driver, 1, used=2)
    segment(driver, 2, used=2, up="1:0")
    anchor(driver, 2, used=2)
    segment(driver, 3, used=1)
    driver.ask("KV.PREFIX.PIN", "ppsas3")
    segment(driver, 4, used=9, up="1:0,2:64")
    assert leaving(driver) == ["ppsas4", "ppsas2", "ppsas1", "ppsas3"]


def test_a_user_with_many_anchors_does_not_take_the_place_of_anothers_last(
    driver: Driver,
) -> None:
    segment(driver, 1, used=1, mid="quiet")
    anchor(driver, 1, used=1, mid="quiet")
    for number in range(1, MOST_ANCHORS + 3):
        segment(driver, number, used=10 + number, mid="busy")
        anchor(driver, number, used=10 + number, mid="busy")
    segment(driver, 2, used=99, mid="quiet")
    order = leaving(driver)
    unprotected = ["ppsbusys1", "ppsbusys2", "ppsbusys3", "ppsquiets2"]
    assert order[:4] == unprotected
    assert order[4] == "ppsquiets1" and len(order) == 4 + MOST_ANCHORS


def test_anchors_are_kept_for_a_third_of_the_disk_budget(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(disk_budget=9 << 20)) as driver:
        for number in (1, 2, 3):
            segment(driver, number, used=number)
            anchor(driver, number, used=number)
            driver.ask("HSET", "pps:sizes", f"a:{number}", str(2 << 20 if number == 3 else 1 << 20))
        segment(driver, 4, used=9)
        assert leaving(driver) == ["ppsas1", "ppsas4", "ppsas2", "ppsas3"]


def test_a_broken_index_breaks_no_eviction(driver: Driver) -> None:
    segment(driver, 1, used=5)
    driver.ask("DEL", "pps:a:seg:1", "pps:lru")
    driver.ask("SET", "pps:lru", "no set")
    driver.ask("SET", "pps:a:seg:1", "no hash")
    driver.ask("ZADD", "pps:anchors", 1, "a:1", 2, "nonsense", 3, "a:")
    driver.ask("SET", "pps:sizes", "x")
    driver.ask(*register("other"))
    assert sorted(leaving(driver)) == ["other", "ppsas1"]


def test_a_number_that_is_none_breaks_no_eviction(driver: Driver) -> None:
    digits = "9" * 5000
    segment(driver, 1, used=5)
    driver.ask(*register(f"ppsas{digits}"))
    anchor(driver, 1, used=5)
    driver.ask("HSET", "pps:sizes", "a:1", digits)
    assert leaving(driver) == [f"ppsas{digits}", "ppsas1"]
