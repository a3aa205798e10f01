"""What the front waits for while an engine starts ends with it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

pytest.importorskip("starlette")

from pion_vllm_mlx.serve.engine_process import cancelled  # noqa: E402


def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    async def knocking(lost: int) -> str:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost -= 1
                if lost < 0:
                    raise

    async def run() -> None:
        tasks = [asyncio.create_task(knocking(lost)) for lost in (0, 1, 2)]
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(cancelled(*tasks), 30)
            assert all(task.cancelled() for task in tasks)
        finally:
            for task in tasks * 3:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task}, timeout=1)

    asyncio.run(run())
