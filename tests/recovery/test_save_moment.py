"""What a snapshot says is of the moment that it keeps, whatever changes while it is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pion_vllm_mlx.server.store import saving, sharing
from pion_vllm_mlx.server.store.compaction import Job
from pion_vllm_mlx.server.store.eviction import strays
from pion_vllm_mlx.server.store.reclaim import Reclaimer
from pion_vllm_mlx.server.store.state import SavedState
from tests.recovery.broken import VSTORE_WAL, content_of
from tests.recovery.driving import Content, Driver, Options
from tests.recovery.material import register, rows, state
from tests.recovery.test_reclaim import half_dead
from tests.recovery.test_save_in_steps import Held
from tests.recovery.twins import COUNT, WIDE, block, put

NO_LOG = Options(wal=False)


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


def test_a_restore_during_a_save_leaves_the_snapshot_as_it_was(folder: Path) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a"))
        driver.ask(*rows("a_pk", 0, 0, 40))
        point = driver.ask("V.SNAPSHOT", "a_pk")
        driver.ask(*rows("a_pk", 0, 0, 100))
        driver.ask(*rows("a_pk", 0, 100, 100))
        expected = driver.content()

        async def both() -> None:
            with Held(driver) as held:
                save_it = asyncio.ensure_future(driver._ask(("KV.PREFIX.SAVE",)))
                await until(held.reached)
                await driver._ask(("V.RESTORE", "a_pk", point))
            await save_it

        driver.loop.run_until_complete(both())
        assert driver.store.state.sessions[b"a_pk"].layers[0].count == 40
    # the power went before that was on the disk
    (folder / VSTORE_WAL).write_bytes(b"")
    assert content_of(folder) == expected


class Still:
    """A function that a thread is in, and does not leave before it is let ``go_on``."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._real = real

    def call(self, *given: Any) -> Any:
        found = self._real(*given)
        self.reached.set()
        assert self.go_on.wait(60)
        return found


@contextmanager
def standing_still(owner: Any, name: str) -> Iterator[Still]:
    """Within the block a function of ``owner`` does not return."""
    still = Still(getattr(owner, name))
    with mock.patch.object(owner, name, lambda *given: still.call(*given)):
        try:
            yield still
        finally:
            still.go_on.set()


def copying(driver: Driver) -> Content:
    """What a copy is due for."""
    return half_dead(driver)


def sharing_rows(driver: Driver) -> Content:
    """What may be stored once, by one step, and nothing to copy."""
    for name in "ab":
        driver.ask(*register(name, 2, WIDE))
        driver.ask(*put(f"{name}_pk", 0, 0, COUNT, block("_pk", 0, 0, COUNT)))
        driver.ask("KV.PREFIX.MAP", name)
    driver.store.state.untidy.clear()
    return driver.content()


STEPS = [(copying, Job, "carry_out"), (sharing_rows, sharing, "_judged")]


@pytest.mark.parametrize(("stored", "owner", "name"), STEPS)
@pytest.mark.parametrize("written", [True, False])
def test_without_a_log_a_step_that_a_save_has_overtaken_moves_nothing(
    folder: Path,
    stored: Callable[[Driver], Content],
    owner: Any,
    name: str,
    written: bool,
) -> None:
    """Neither behind the save nor while its snapshot is being written."""
    with Driver(folder, NO_LOG) as driver:
        expected = stored(driver)

        async def both() -> None:
            with standing_still(owner, name) as still:
                step = asyncio.ensure_future(_tidied(driver, still))
                await until(still.reached)
                save_it: Coroutine[Any, Any, Any] = driver._ask(("KV.PREFIX.SAVE",))
                if written:
                    await save_it
                    still.go_on.set()
                    await step
                    return
                with Held(driver) as held:
                    saving_it = asyncio.ensure_future(save_it)
                    await until(held.reached)
                    still.go_on.set()
                    await step
                await saving_it

        driver.loop.run_until_complete(both())
        assert driver.content() == expected
    assert content_of(folder, NO_LOG) == expected


async def _tidied(driver: Driver, still: Still) -> None:
    """Steps until one has stood still, and that one to its end."""
    reclaimer = Reclaimer(driver.store)
    while not still.reached.is_set():
        await reclaimer.step()


def test_short_states_are_read_in_the_snapshot_some_at_a_time_and_without_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "PART", 2)
    with Driver(folder) as driver:
        for number in range(9):
            driver.ask(*state(f"n{number}", 0, 100))
        store = driver.store
        moves: list[int] = []
        late: list[asyncio.Task[Any]] = []
        real = store.state.move_inline_states

        def move(saved: Iterable[SavedState]) -> None:
            part = list(saved)
            if not moves:
                assert not store.write_lock.locked()
                late.append(asyncio.ensure_future(driver._ask(state("n8", 0, 100, 1))))
            moves.append(len(part))
            real(part)

        monkeypatch.setattr(store.state, "move_inline_states", move)
        driver.ask("KV.PREFIX.SAVE")
        driver.loop.run_until_complete(asyncio.gather(*late))
        # the late one may have replaced its state
        assert sum(moves) in (8, 9) and max(moves) == 2
        expected = driver.content()
    assert content_of(folder) == expected


def order(driver: Driver) -> list[bytes]:
    """In which order states without a namespace would leave."""
    return [sid for sid, _ in strays(driver.store.state)]


def test_strays_leave_least_recently_used_first_also_after_saves_and_starts(folder: Path) -> None:
    with Driver(folder) as driver:
        for number in range(6):
            driver.ask(*state(f"n{number}", 0, 100))
        for used in (4, 0):
            driver.state_of(f"n{used}", 0)
        expected = order(driver)
        assert expected == [b"n1", b"n2", b"n3", b"n5", b"n4", b"n0"]
        driver.ask("KV.PREFIX.SAVE")
    for _ in range(2):
        with Driver(folder) as driver:
            assert order(driver) == expected
            driver.ask("KV.PREFIX.SAVE")
