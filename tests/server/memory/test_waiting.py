"""Who waits for whom: slots and layers in use, and long arguments under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.server.commands.attend_index import search, store_rows
from pion_vllm_mlx.server.commands.state_slots import state_read, state_write
from pion_vllm_mlx.server.inbound import WindowPool
from pion_vllm_mlx.server.ledger import Ledger
from pion_vllm_mlx.server.long_arguments import LongArguments
from pion_vllm_mlx.server.memory.attend_index import IndexShape, value_format
from pion_vllm_mlx.server.session import Client, Context, Server, ServerConfig
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.store import Store


@asynccontextmanager
async def context_in(folder: Path) -> AsyncIterator[Context]:
    """What a command handler sees of a server whose data lies in ``folder``."""
    server = Server(ServerConfig(folder), Store(StoreConfig(folder)), Ledger(), WindowPool())
    try:
        yield Context(server, Client(1, "", True))
    finally:
        await server.store.close()


async def waits(work: asyncio.Task[object]) -> bool:
    """Whether a task is still waiting after everything else had its turn."""
    done, _ = await asyncio.wait([work], timeout=0.05)
    return not done


@pytest.mark.parametrize("length", [4, 3 << 20])
def test_a_slot_in_use_is_neither_read_nor_written(tmp_path: Path, length: int) -> None:
    async def main() -> None:
        async with context_in(tmp_path) as context:
            context.server.memory.states.alloc(b"s", length, False)
            slot = context.server.memory.states.get(b"s")
            words = [b"", b"s", b"0"]
            for work in (
                state_write(context, [*words, bytes(length)]),
                state_read(context, [*words, b"%d" % length]),
            ):
                async with slot.lock:
                    task: asyncio.Task[object] = asyncio.ensure_future(work)
                    assert await waits(task)
                await task

    asyncio.run(main())


def test_a_layer_being_stored_to_is_searched_before_or_after(tmp_path: Path) -> None:
    async def main() -> None:
        async with context_in(tmp_path) as context:
            server = context.server
            index = server.memory.index
            kind = value_format("fp32", 1, 0)
            index.create(b"s", IndexShape(1, 1, kind, 0, kind))
            ones = np.ones(1, "<f4").tobytes()
            await store_rows(server, b"s", 0, 1, (ones, ones))
            session = index.session(b"s")
            for work in (
                search(server, b"s", 0, 1, ones),
                store_rows(server, b"s", 0, 1, (ones, ones)),
            ):
                async with session.lock:
                    task: asyncio.Task[object] = asyncio.ensure_future(work)
                    assert await waits(task)
                await task
            assert session.num_tokens == 2

    asyncio.run(main())


def test_who_finds_no_room_waits_and_is_woken_once() -> None:
    async def main() -> None:
        woken: list[str] = []
        budget = LongArguments(100)
        first = budget.open(60, lambda: woken.append("first"))
        second = budget.open(60, lambda: woken.append("second"))
        assert first.buffer() is not None and budget.held == 60
        assert second.buffer() is None and second.buffer() is None
        first.release()
        first.release()
        assert budget.held == 0
        await asyncio.sleep(0)
        assert woken == ["second"]
        window = second.buffer()
        assert window is not None and len(window) == 60
        second.release()

    asyncio.run(main())


async def released(release: Callable[[], None]) -> None:
    release()


def test_the_memory_of_a_kept_view_outlives_its_command() -> None:
    budget = LongArguments(100)
    target = budget.open(4, lambda: None)
    window = target.buffer()
    assert window is not None
    window[:] = b"kept"
    target.advance(4)
    view = target.view
    asyncio.run(released(target.release))
    assert view == b"kept" and view.readonly and budget.held == 0
