"""PIN, UNPIN, EXPIRE, OWNER: who goes last, who goes when, and who is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.store.eviction import LeastRecentlyUsed, PinLimits, Shortage
from pion_vllm_mlx.server.store.index import Session
from pion_vllm_mlx.server.store.records import Create, Drop
from pion_vllm_mlx.server.store.state import State
from tests.recovery.driving import Driver, Options, refused
from tests.recovery.material import register, rows, state
from tests.server.wire import Wire, refuse

SPACE = "pion_vllm_mlx.server.store.space"


def held(driver: Driver) -> set[str]:
    return {sid.decode()[:-3] for sid in driver.store.state.sessions}


def later(seconds: float) -> mock._patch[mock.MagicMock]:
    """Within the block, every clock of the server shows a later time."""
    now = time.time() + seconds
    return mock.patch.object(time, "time", lambda: now)


def test_the_least_recently_used_pinned_prefix_outlives_all_others(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(max_sessions=8)) as driver:
        driver.ask(*register("kept"))
        assert driver.ask("KV.PREFIX.PIN", "kept") == 1
        for number in range(10):
            driver.ask(*register(f"n{number}"))
        assert held(driver) == {"kept", "n7", "n8", "n9"}

        assert driver.ask("KV.PREFIX.UNPIN", "kept") == 1
        driver.ask(*register("n10"))
        assert held(driver) == {"n7", "n8", "n9", "n10"}


def test_where_there_are_many_sessions_one_look_serves_all_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is used meanwhile, pinned or dropped has lost the place it had."""
    monkeypatch.setattr(f"{SPACE}.MANY", 16)
    monkeypatch.setattr(f"{SPACE}._NEARLY_FULL", 2)
    with Driver(tmp_path, Options(max_sessions=64)) as driver:
        driver.ask(*register("kept"))
        driver.ask("KV.PREFIX.PIN", "kept")
        policy, looked_at = driver.store.space.policy, []
        real = policy.victims

        def victims(state: State, *rest: Any) -> Iterator[Session]:
            for session in real(state, *rest):
                looked_at.append(session.sid)
                yield session

        monkeypatch.setattr(policy, "victims", victims)
        for number in range(31):
            driver.ask(*register(f"n{number}"))
        driver.ask(*register("n31"))
        assert held(driver) == {"kept", *(f"n{number}" for number in range(1, 32))}
        driver.ask("KV.PREFIX.LOOKUP", "n2")
        driver.ask("KV.PREFIX.PIN", "n3")
        driver.ask("KV.PREFIX.DROP", "n4")
        for number in range(32, 42):
            driver.ask(*register(f"n{number}"))
            assert len(driver.store.state.sessions) <= 64
        # n1, then those behind n4 whose place was free, in their order
        gone = {"n0", "n1", *(f"n{number}" for number in range(4, 13))} - {"n3"}
        assert held(driver) == {"kept", *(f"n{number}" for number in range(42))} - gone
        assert len(looked_at) <= 64


def test_a_look_that_is_used_up_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{SPACE}.MANY", 16)
    with Driver(tmp_path, Options(max_sessions=32)) as driver:
        looks = mock.Mock(wraps=driver.store.space.look)
        monkeypatch.setattr(driver.store.space, "look", looks)
        for number in range(80):
            driver.ask(*register(f"n{number}"))
            assert held(driver) == {f"n{one}" for one in range(max(0, number - 15), number + 1)}
        assert 4 <= looks.call_count <= 8


@pytest.mark.parametrize("shortage", Shortage)
def test_an_order_out_of_one_look_is_the_policy_s_own_also_among_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortage: Shortage
) -> None:
    monkeypatch.setattr(f"{SPACE}.MANY", 0)
    with Driver(tmp_path, Options(quota=1 << 30)) as driver:
        for number in range(9):
            driver.ask(*register(f"n{number}"))
            driver.ask(*rows(f"n{number}_pk", 0, 0, 5))
        store, space = driver.store, driver.store.space
        admins = [Create(b"a%d_pk" % number, 64, "fp16", "fp16", 1, {}) for number in range(7)]
        driver.loop.run_until_complete(store.commit(lambda: admins))
        space.look()
        driver.loop.run_until_complete(store.commit(lambda: [Drop((b"t:n3_pk",), "", 0)]))
        assert space.standing is not None
        for arriving in ([], [b"b%d_pk" % number for number in range(9)]):
            order = list(space.policy.victims(store.state, shortage, arriving))
            assert len(order) == 24
            assert list(space.standing.next(shortage, arriving)) == order


def test_bytes_of_many_sessions_become_free_in_order_without_a_look_at_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States without a namespace leave in their turn."""
    monkeypatch.setattr(f"{SPACE}.MANY", 4)
    with Driver(tmp_path) as driver:
        driver.ask(*register("kept"))
        driver.ask(*rows("kept_pk", 0, 0, 600))
        driver.ask("KV.PREFIX.PIN", "kept")
        for number in range(8):
            driver.ask(*register(f"n{number}"))
            driver.ask(*rows(f"n{number}_pk", 0, 0, 600))
        driver.ask(*state("stray", 0, 100))
        driver.ask("KV.PREFIX.LOOKUP", "n0")
        store, space = driver.store, driver.store.space
        left: list[str] = []
        space.look()
        monkeypatch.setattr(space.policy, "victims", mock.Mock(side_effect=AssertionError))
        driver.ask("KV.PREFIX.LOOKUP", "n2")
        for _ in range(6):
            before = held(driver)
            driver.loop.run_until_complete(store.commit(lambda: space.evict_for_bytes(1)))
            left += sorted(before - held(driver))
        assert left == ["n1", "n3", "n4", "n5", "n6", "n7"] and b"stray" in store.state.states
        driver.loop.run_until_complete(store.commit(lambda: space.evict_for_bytes(1)))
        assert b"stray" not in store.state.states and "n0" in held(driver)


def test_a_new_session_pays_for_a_bounded_part_of_those_that_are_too_many(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(max_sessions=2000)) as driver:
        for number in range(600):
            driver.ask(*register(f"n{number}"))
        driver.store.space.max_sessions = 4
        driver.ask(*register("new"))
        assert len(driver.store.state.sessions) == 1200 + 2 - 512
        assert "new" in held(driver) and "n599" in held(driver)


def test_pins_are_evicted_where_nothing_else_is_left(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(max_sessions=4)) as driver:
        driver.ask(*register("kept"))
        driver.ask("KV.PREFIX.PIN", "kept")
        for number in range(2):
            driver.ask(*register(f"n{number}"))
        policy = driver.store.space.policy
        victims = [s.sid for s in policy.victims(driver.store.state, Shortage.SESSIONS)]
        assert victims == [b"n1_pk", b"n1_pv", b"kept_pk", b"kept_pv"]


def test_pins_past_half_of_the_table_are_refused(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(max_sessions=8)) as driver:
        for name in "abc":
            driver.ask(*register(name))
        assert [driver.ask("KV.PREFIX.PIN", name) for name in "ab"] == [1, 1]
        limit = "pinned prefixes may take 4 sessions at most"
        assert limit in refused(driver, "KV.PREFIX.PIN", "c")
        # what is pinned already stays within the cap
        assert driver.ask("KV.PREFIX.PIN", "a") == 1
        driver.ask("KV.PREFIX.UNPIN", "a")
        assert driver.ask("KV.PREFIX.PIN", "c") == 1


def test_pins_that_grew_past_the_cap_protect_the_newest_of_them(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for name in "abc":
            driver.ask(*register(name))
            driver.ask(*rows(f"{name}_pk", 0, 0, 10))
            driver.ask("KV.PREFIX.PIN", name)
        a_side = driver.store.state.sessions[b"a_pk"].row_bytes()
        policy = LeastRecentlyUsed(PinLimits(bytes=2 * a_side))
        found = policy.victims(driver.store.state, Shortage.BYTES)
        order = [session.sid for session in found]
        assert order[:2] == [b"a_pv", b"a_pk"] and order[-1] == b"c_pk"


def test_where_bytes_are_short_pinned_prefixes_leave_after_those_that_are_stored_to(
    tmp_path: Path,
) -> None:
    """And none of them while bytes of another prefix are being written."""
    with Driver(tmp_path) as driver:
        for name in ("kept", "older", "busy", "idle"):
            driver.ask(*register(name))
            driver.ask(*rows(f"{name}_pk", 0, 0, 600))
        driver.ask("KV.PREFIX.PIN", "kept")
        driver.ask("KV.PREFIX.PIN", "older")
        space, left = driver.store.space, []
        regions = [space.reserve(name, 1000, 1) for name in (b"kept", b"busy")]

        def evict() -> None:
            effects, before = space.evict_for_bytes(1), held(driver)
            driver.loop.run_until_complete(driver.store.commit(lambda: effects))
            left.append(*before - held(driver))

        evict()
        evict()
        with pytest.raises(CommandError, match="disk budget"):
            space.evict_for_bytes(1)
        space.release(regions[1])
        evict()
        evict()
        space.release(regions[0])
        assert left == ["idle", "busy", "older", "kept"]


def test_pins_and_deadlines_survive_log_and_snapshot(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for name in "abc":
            driver.ask(*register(name))
        driver.ask("KV.PREFIX.PIN", "a")
        driver.ask("KV.PREFIX.PIN", "b")
        driver.ask("KV.PREFIX.UNPIN", "b")
        driver.ask("KV.PREFIX.EXPIRE", "c", 100)
        driver.ask("KV.PREFIX.EXPIRE", "b", 100)
        driver.ask("KV.PREFIX.EXPIRE", "b", -1)
    for command in ("KV.PREFIX.SAVE", "PING", "KV.PREFIX.SAVE"):
        with Driver(tmp_path) as driver:
            sessions = driver.store.state.sessions
            assert {sid for sid, s in sessions.items() if s.pinned} == {b"a_pk", b"a_pv"}
            assert driver.store.state.timed == {b"c_pk", b"c_pv"}
            driver.ask(command)
            with later(101):
                answers = [driver.ask("KV.PREFIX.LOOKUP", name) for name in "abc"]
            assert answers == ["HIT", "HIT", "MISS"]


def test_nothing_of_a_namespace_past_its_deadline_is_served(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16", "BLOCKS", 64, 1, bytes(8))
    wire.ok("V.STOREBATCH", f"{ns}_pk", 0, 0, 1, bytes(256))
    wire.ok("V.STOREBATCH", f"{ns}_pv", 0, 0, 1, bytes(256))
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT" and wire.ask("KV.PREFIX.OWNER", ns) == "0"

    answers = wire.together(
        ("KV.PREFIX.EXPIRE", ns, 0),
        ("KV.PREFIX.LOOKUP", ns),
        ("KV.PREFIX.OWNER", ns),
        ("KV.PREFIX.BLOCKS", ns),
        ("KV.PREFIX.MEMBERSHIP", ns, 1, bytes(8)),
        ("KV.PREFIX.MAP", ns),
        ("V.INFO", f"{ns}_pk"),
        ("V.FETCH", f"{ns}_pk", 0, "RANGE", 0, 1),
        ("KV.PREFIX.PIN", ns),
        ("KV.PREFIX.EXPIRE", ns, 100),
    )

    assert answers[:7] == [1, "MISS", "-1", "UNKNOWN", "UNKNOWN", "UNKNOWN", None]
    assert "not found" in answers[7] and answers[8:] == [0, 0]
    assert b"expired" in wire.ask("KV.PREFIX.EXPLAIN", ns)


def test_housekeeping_drops_what_is_over_with_its_states(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")
    wire.ok("SSM.PREFIX.STORE", f"{ns}@8", 0, b"state")
    before = int(wire.info("KV.PREFIX.INFO")["vstore_sessions"])
    wire.ask("KV.PREFIX.EXPIRE", ns, 0)
    deadline = time.monotonic() + 20
    while int(wire.info("KV.PREFIX.INFO")["vstore_sessions"]) > before - 2:
        assert time.monotonic() < deadline, "never dropped"
        time.sleep(0.02)
    assert b'"expired"' in wire.ask("KV.PREFIX.EXPLAIN", ns)
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")
    assert wire.ask("SSM.PREFIX.FETCH", f"{ns}@8", 0) is None


def test_no_state_of_a_namespace_past_its_deadline_is_served(tmp_path: Path) -> None:
    sids = ("a", "a@8", "a@8@guard", "b@8", "ab")
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"))
        for sid in sids:
            driver.ask(*state(sid, 0, 100))
        driver.ask("KV.PREFIX.EXPIRE", "a", 50)
        assert all(driver.state_of(sid, 0) is not None for sid in sids)
        with later(51):
            kept = [sid for sid in sids if driver.state_of(sid, 0) is not None]
            assert kept == ["b@8", "ab"]
            assert '"states": []' in driver.ask("KV.PREFIX.EXPLAIN", "a")
        assert driver.ask("KV.PREFIX.EXPIRE", "a", -1) == 1
        with later(51):
            assert all(driver.state_of(sid, 0) is not None for sid in sids)


@pytest.mark.parametrize("sid", ["a", "a@8"])
def test_a_state_stored_behind_the_deadline_outlives_the_sweep(tmp_path: Path, sid: str) -> None:
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"))
        driver.ask(*state("a@9", 0, 100))
        driver.ask("KV.PREFIX.EXPIRE", "a", 50)
        with later(51):
            driver.ask(*state(sid, 0, 100))
            driver.loop.run_until_complete(driver.store.expire())
            assert driver.state_of(sid, 0) is not None and driver.state_of("a@9", 0) is None
    with Driver(tmp_path) as driver:
        assert driver.state_of(sid, 0) is not None and held(driver) == set()


def test_a_session_past_its_deadline_is_dropped_and_not_counted(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        for name in "ab":
            driver.ask(*register(name))
        driver.ask("KV.PREFIX.EXPIRE", "a", 50)
        with later(51):
            assert driver.ask("V.DROP", "a_pk", "b_pk") == 1
        assert {session.sid for session in driver.store.state.sessions.values()} == {
            b"a_pv",
            b"b_pv",
        }


def test_an_expired_namespace_is_registered_anew_and_empty(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"), "BLOCKS", 64, 1, bytes(8))
        driver.ask(*rows("a_pk", 0, 0, 3))
        driver.ask(*state("a", 0, 100))
        driver.ask("KV.PREFIX.EXPIRE", "a", 50)
        with later(51):
            driver.ask(*register("a"))
            assert driver.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
            assert driver.ask("KV.PREFIX.BLOCKS", "a") == "UNKNOWN"
            assert driver.state_of("a", 0) is None
        expected = driver.content()
        assert not driver.store.state.timed
    with Driver(tmp_path) as driver, later(100):
        assert driver.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
        assert driver.content() == expected


def test_an_expiry_is_an_effect_that_a_restart_does_not_undo(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"))
        driver.ask(*register("b"))
        driver.ask("KV.PREFIX.EXPIRE", "a", 50)
        driver.loop.run_until_complete(driver.store.expire())
        assert held(driver) == {"a", "b"}
        with later(51):
            driver.loop.run_until_complete(driver.store.expire())
        assert held(driver) == {"b"}
    with Driver(tmp_path) as driver:
        assert held(driver) == {"b"}


@pytest.mark.parametrize("seconds", ["", "-2", "1e3", "abc", "99999999999", "1.5"])
def test_a_bad_number_of_seconds_is_refused(wire: Wire, ns: str, seconds: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")
    refuse(wire, "seconds", "KV.PREFIX.EXPIRE", ns, seconds)


@pytest.mark.parametrize("command", ["PIN", "UNPIN", "EXPIRE"])
def test_a_namespace_that_is_not_there_is_no_error(wire: Wire, ns: str, command: str) -> None:
    more = (10,) if command == "EXPIRE" else ()
    assert wire.ask(f"KV.PREFIX.{command}", ns, *more) == 0
    assert wire.ask("KV.PREFIX.OWNER", ns) == "-1"
