"""Who leaves next where there are many sessions: one look at all of them, and what came since."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.shares import Ledger
from pion_vllm_mlx.server.store.eviction import Shortage
from pion_vllm_mlx.server.store.index import Session, group_of
from pion_vllm_mlx.server.store.records import Drop
from pion_vllm_mlx.server.store.standing import Standing
from tests.recovery.driving import Driver, Options
from tests.recovery.material import register, rows

MANY = "pion_vllm_mlx.server.store.space.MANY"


def store(driver: Driver, namespace: str, count: int = 600) -> None:
    driver.ask(*register(namespace))
    if count:
        driver.ask(*rows(f"{namespace}_pk", 0, 0, count))


def admins(driver: Driver, count: int, rows_each: int = 0) -> None:
    """Sessions of the server's own user, two a prefix."""
    client = driver.context.client
    tenant, client.tenant = client.tenant, b""
    for number in range(count // 2):
        store(driver, f"admin{number}", rows_each)
    client.tenant = tenant


def evict(driver: Driver, excess: int = 1) -> set[str]:
    """Make room for bytes; the namespaces that left."""
    state = driver.store.state
    before = set(state.sessions)
    driver.loop.run_until_complete(
        driver.store.commit(lambda: driver.store.space.evict_for_bytes(excess))
    )
    return {group_of(sid).decode() for sid in before - set(state.sessions)}


def open_but_deleted(folder: Path) -> list[str]:
    """Segments that this process keeps open though they went."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists them
        if target.startswith(str(folder)) and target.endswith(".safetensors (deleted)"):
            found.append(target)
    return found


def test_a_look_keeps_no_file_open_of_what_left_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANY, 0)
    with Driver(tmp_path) as driver:
        for number in range(5):
            store(driver, f"n{number}")
        driver.store.space.look()
        driver.ask("KV.PREFIX.DROP", "n2")
        assert open_but_deleted(tmp_path) == []
        assert evict(driver) == {"n0"}
        assert open_but_deleted(tmp_path) == []


def test_a_prefix_that_is_registered_anew_does_not_leave_in_its_former_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANY, 0)
    with Driver(tmp_path) as driver:
        for number in range(3):
            store(driver, f"n{number}")
        driver.store.space.look()
        driver.ask("KV.PREFIX.DROP", "n0")
        store(driver, "n0")
        assert [evict(driver) for _ in range(3)] == [{"n1"}, {"n2"}, {"n0"}]


def test_a_look_is_forgotten_where_there_are_few_sessions_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANY, 3)
    with Driver(tmp_path) as driver:
        store(driver, "n0")
        store(driver, "n1")
        driver.store.space.look()
        driver.ask("PING")
        assert driver.store.space.standing is not None
        driver.ask("KV.PREFIX.DROP", "n0")
        store(driver, "n1")
        assert driver.store.space.standing is None


def test_what_left_is_passed_once_though_somebody_before_it_cannot_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANY, 0)
    with Driver(tmp_path) as driver:
        driver.ask(*register("empty"))
        for number in range(30):
            store(driver, f"n{number}", 40)
        driver.store.space.look()
        passed: list[bytes] = []
        real = Standing._as_it_was

        def as_it_was(self: Standing, sid: bytes, used: object) -> Session | None:
            passed.append(sid)
            return real(self, sid, used)

        monkeypatch.setattr(Standing, "_as_it_was", as_it_was)
        left = [evict(driver) for _ in range(30)]
        assert left == [{f"n{number}"} for number in range(30)]
        assert len(passed) <= 30 * 8


def test_a_tenant_past_its_quota_pays_for_its_own_sessions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of them were used since the last look, and nobody waits for another one."""
    monkeypatch.setattr(MANY, 16)
    with Driver(tmp_path, Options(quota=200 << 10)) as driver:
        admins(driver, 20)
        store(driver, "n0")
        store(driver, "n1")
        space = driver.store.space
        space.look()
        looks = mock.Mock(wraps=space.look)
        monkeypatch.setattr(space, "look", looks)
        real, ordered = space.policy.order, set[bytes]()

        def order(sessions: Iterable[Session]) -> Iterator[Session]:
            sessions = list(sessions)
            ordered.update(session.sid for session in sessions)
            return real(sessions)

        monkeypatch.setattr(space.policy, "order", order)
        monkeypatch.setattr(space.policy, "victims", mock.Mock(side_effect=AssertionError))
        for number in range(2, 10):
            for one in range(number - 2, number):
                assert driver.ask("KV.PREFIX.LOOKUP", f"n{one}") == "HIT"
            store(driver, f"n{number}")
            assert driver.ask("KV.PREFIX.LOOKUP", f"n{number - 2}") == "MISS"
        with pytest.raises(CommandError, match="quota"):
            driver.ask(*rows("n9_pk", 0, 600, 2000))
        driver.loop.run_until_complete(driver.store.commit(list))
        assert ordered and all(sid.startswith(b"t:") for sid in ordered)
        assert looks.call_count == 0


@pytest.mark.parametrize("many", [8, 30], ids=["of many", "of few"])
@pytest.mark.parametrize("shortage", Shortage)
def test_who_has_most_gives_first_also_where_all_of_it_was_used_since_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, shortage: Shortage
) -> None:
    monkeypatch.setattr(MANY, many)
    with Driver(tmp_path, Options(quota=1 << 30)) as driver:
        admins(driver, 8, 40)
        for number in range(12):
            store(driver, f"n{number}", 40)
        space, state = driver.store.space, driver.store.state
        space.look()
        for number in range(12):
            driver.ask("KV.PREFIX.LOOKUP", f"n{number}")
        if shortage is Shortage.BYTES:
            left = [evict(driver) for _ in range(3)]
            assert left == [{"t:n0"}, {"t:n1"}, {"t:n2"}]
            return
        space.max_sessions = len(state.sessions)
        order = [one.sid for one in space.policy.victims(state, shortage, [b"t:new_pk"])]
        for _ in range(2):  # the second one finds what was found by the first
            effects = space.evict_for_sessions([b"t:new_pk"] * 6)
            gone = [sid for e in effects if isinstance(e, Drop) for sid in e.sids]
            assert gone == order[:6]
        assert gone[0].startswith(b"t:")
        # another look at all comes only where this was one at many
        assert space.look_is_due() == (many == 8)


def test_no_look_is_due_for_who_has_nothing_left_that_pins_do_not_protect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then others give, in their order."""
    monkeypatch.setattr(MANY, 4)
    with Driver(tmp_path, Options(quota=1 << 30)) as driver:
        admins(driver, 4)
        for number in range(4):
            driver.ask(*register(f"n{number}"))
            driver.ask("KV.PREFIX.PIN", f"n{number}")
        space = driver.store.space
        space.max_sessions = len(driver.store.state.sessions)
        space.look()
        effects = space.evict_for_sessions([b"new_pk", b"new_pv"])
        gone = [sid for effect in effects if isinstance(effect, Drop) for sid in effect.sids]
        assert gone == [b"admin0_pk", b"admin0_pv"]
        assert not space.look_is_due()


@pytest.mark.parametrize("dropped", [0, 2], ids=["all there", "some dropped"])
def test_who_has_most_gives_first_also_where_its_pins_were_taken_back_since_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: int
) -> None:
    monkeypatch.setattr(MANY, 4)
    with Driver(tmp_path, Options(quota=1 << 30)) as driver:
        admins(driver, 4)
        names = [f"n{number}" for number in range(8)]
        for name in names:
            driver.ask(*register(name))
            driver.ask("KV.PREFIX.PIN", name)
        space, state = driver.store.space, driver.store.state
        space.look()
        for name in names:
            driver.ask("KV.PREFIX.UNPIN", name)
        for name in names[:dropped]:
            driver.ask("KV.PREFIX.DROP", name)
        space.max_sessions = len(state.sessions)
        effects = space.evict_for_sessions([b"t:new_pk", b"t:new_pv"])
        gone = [sid for effect in effects if isinstance(effect, Drop) for sid in effect.sids]
        first = f"t:n{dropped}".encode()
        assert gone == [first + b"_pk", first + b"_pv"]


def of_tenant(driver: Driver) -> int:
    """Bytes of a tenant's states and rows."""
    state = driver.store.state
    blobs = [b for sid, s in state.states.items() if sid.startswith(b"t:") for b in s.values()]
    mine = (one for sid, one in state.sessions.items() if sid.startswith(b"t:"))
    return sum(blob.length for blob in blobs) + sum(session.row_bytes() for session in mine)


@pytest.mark.parametrize("look", [False, True], ids=["no look at hand", "a look at hand"])
def test_a_session_without_a_namespace_makes_room_in_its_quota_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: bool
) -> None:
    monkeypatch.setattr(MANY, 4)
    quota = 200 << 10
    with Driver(tmp_path, Options(quota=quota)) as driver:
        admins(driver, 8)
        driver.ask("V.CREATE", "lone", 16, "VQUANT", "fp16")
        driver.ask("SSM.PREFIX.STORE", "kept", 0, bytes(120 << 10))
        driver.ask("V.STOREBATCH", "lone", 0, 0, 1920, bytes(1920 * 2 * 16), "FMT", "F16")
        if look:
            driver.store.space.look()
        with pytest.raises(CommandError, match="quota"):
            driver.ask("SSM.PREFIX.STORE", "kept", 1, bytes(100 << 10))
        assert of_tenant(driver) == (120 << 10) + 1920 * 2 * 16


def test_states_of_two_namespaces_make_room_in_their_quota_once(tmp_path: Path) -> None:
    with Driver(tmp_path, Options(quota=200 << 10)) as driver:
        driver.ask("SSM.PREFIX.STORE", "kept", 0, bytes(120 << 10))
        driver.ask("SSM.PREFIX.STORE", "a@4", 0, bytes(60 << 10))
        driver.ask("SSM.PREFIX.STORE", "a", 0, bytes(1 << 10))
        with pytest.raises(CommandError, match="quota"):
            driver.ask("SSM.PREFIX.STORE", "kept", 1, bytes(100 << 10))
        assert of_tenant(driver) == 181 << 10


def test_a_checkpoint_that_is_a_namespace_too_leaves_though_its_own_left_before(
    tmp_path: Path,
) -> None:
    with Driver(tmp_path, Options(quota=200 << 10)) as driver:
        store(driver, "a", 100)
        store(driver, "a@4", 900)
        driver.ask("SSM.PREFIX.STORE", "a@4", 0, bytes(1 << 10))
        driver.ask("SSM.PREFIX.STORE", "new", 0, bytes(150 << 10))
        assert of_tenant(driver) == 150 << 10
        assert set(driver.store.state.sessions) == set()


def test_pins_that_a_larger_budget_protects_are_protected_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MANY, 0)
    with Driver(tmp_path, Options(disk_budget=16 << 20)) as driver:
        driver.ask(*register("kept"))
        driver.ask("KV.PREFIX.PIN", "kept")
        driver.ask(*rows("kept_pk", 0, 0, 70_000))  # more than half of the budget
        for number in range(2):
            store(driver, f"n{number}")
        space = driver.store.space
        space.look()
        space.disk_allows = lambda free, used: 64 << 20
        assert space.excess(space.disk_budget) <= 0
        assert [evict(driver) for _ in range(2)] == [{"n0"}, {"n1"}]


def test_a_ledger_that_is_cleared_knows_no_names() -> None:
    ledger = Ledger((b"t",))
    ledger.put(b"t:one", 5)
    ledger.count(b"t:one", True)
    ledger.clear()
    assert not ledger.bytes_of and not ledger.totals and not ledger.names
