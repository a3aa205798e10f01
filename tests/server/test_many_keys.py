"""Where there are many keys, looking at all of them leaves turns to others, and misses none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.server import dispatch, turns
from pion_vllm_mlx.server.session import Context
from tests.recovery.driving import Driver, Word

KEYS = 2000
STAY = {b"t:stay:%d" % number for number in range(KEYS)}
LISTS: list[tuple[Word, ...]] = [
    ("KEYS", "*"),
    ("KEYS", "*stay*"),
    ("SCAN", 0, "MATCH", "*stay*", "COUNT", 1_000_000),
]
#: a command, and whether a tenant gives it: the admin's INFO counts without a look at keys
LOOKS = [*((words, tenant) for words in LISTS for tenant in (False, True)), (("INFO",), True)]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A server with keys, where others have a turn after every look at one."""
    monkeypatch.setattr(turns, "TURN_SECONDS", -1.0)
    with Driver(tmp_path) as started:
        started.ask("MSET", *(word for name in sorted(STAY) for word in (name, b"v")))
        yield started


async def ask(context: Context, words: tuple[Word, ...]) -> Any:
    args = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    answer = dispatch.execute(context, list(args))
    return await answer if isinstance(answer, Awaitable) else answer


def of_tenant(driver: Driver) -> Context:
    return replace(driver.context, client=replace(driver.context.client, tenant=b"t"))


def meanwhile(
    driver: Driver, context: Context, words: tuple[Word, ...], step: Callable[[int], Awaitable[Any]]
) -> tuple[Any, int]:
    """The reply to a command, and how many steps of others were taken before it was there."""

    async def run() -> tuple[Any, int]:
        asked, steps = asyncio.create_task(ask(context, words)), 0
        await asyncio.sleep(0)
        while not asked.done():
            await step(steps)
            steps += 1
        return asked.result(), steps

    return driver.loop.run_until_complete(run())


def names_in(words: tuple[Word, ...], answer: Any) -> list[bytes]:
    found: list[bytes] = answer[1] if words[0] == "SCAN" else answer
    return found


@pytest.mark.parametrize(("words", "tenant"), LOOKS)
def test_others_have_turns_while_all_keys_are_looked_at(
    driver: Driver, words: tuple[Word, ...], tenant: bool
) -> None:
    context = of_tenant(driver) if tenant else driver.context
    answer, steps = meanwhile(driver, context, words, lambda number: asyncio.sleep(0))
    assert steps >= KEYS
    if words[0] == "INFO":
        assert f"db0:keys={KEYS},expires=0" in answer
    else:
        shown = {name.removeprefix(b"t:") for name in STAY} if tenant else STAY
        assert sorted(names_in(words, answer)) == sorted(shown)


@pytest.mark.parametrize("words", LISTS)
def test_what_is_there_all_the_while_is_listed_once_and_what_comes_is_not(
    driver: Driver, words: tuple[Word, ...]
) -> None:
    async def change(number: int) -> None:
        for command in (
            ("SET", f"t:stay:come{number}", "v"),
            ("SET", f"t:stay:{number}", "another"),
            ("DEL", f"t:stay:go{number % 100}"),
            ("SET", f"t:stay:go{number % 100}", "again"),
            ("RENAME", f"t:stay:come{number}", f"t:stay:named{number}"),
        ):
            await ask(driver.context, command)

    for number in range(100):
        driver.ask("SET", f"t:stay:go{number}", "v")
    answer, steps = meanwhile(driver, driver.context, words, change)
    found = names_in(words, answer)
    assert steps > 20 and len(found) == len(set(found))
    assert set(found) >= STAY
    assert all(name.startswith(b"t:stay:go") for name in set(found) - STAY)


def test_keys_that_are_all_deleted_meanwhile_end_the_list(driver: Driver) -> None:
    async def flush(number: int) -> None:
        if number == 20:
            await ask(driver.context, ("FLUSHALL",))
            await ask(driver.context, ("SET", "new", "v"))
        await asyncio.sleep(0)

    answer, _ = meanwhile(driver, driver.context, ("KEYS", "*"), flush)
    assert set(answer) <= STAY and len(answer) < KEYS
    assert driver.ask("KEYS", "*") == [b"new"]


def test_a_tenants_info_in_a_transaction_is_of_its_moment(driver: Driver) -> None:
    context = of_tenant(driver)
    for words in (("MULTI",), ("INFO", "keyspace"), ("KEYS", "stay:1*")):
        driver.loop.run_until_complete(ask(context, words))
    info, keys = driver.loop.run_until_complete(ask(context, ("EXEC",)))
    assert f"keys={KEYS}" in info
    assert len(keys) == sum(name.startswith(b"t:stay:1") for name in STAY)
