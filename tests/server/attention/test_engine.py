"""The engine: one thread, in order, and queries of one layer in one pass over its K/V."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.server.attention.engine import MAX_ROWS, Call, Engine
from pion_vllm_mlx.server.attention.requests import Auto, Dense, Sizes, Sparse
from pion_vllm_mlx.server.attention.resident import Resident, from_floats
from tests.server.attention import oracle
from tests.server.attention.asking import Floats, normal

KEYS, VALUES = normal(1, 2, 200, 32), normal(2, 2, 200, 32)


def run(work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        engine = Engine()
        try:
            await work(engine)
        finally:
            engine.close()

    asyncio.run(inside())


@asynccontextmanager
async def held_up(engine: Engine) -> AsyncIterator[None]:
    """The thread is busy until the block ends."""
    go = threading.Event()
    busy = asyncio.ensure_future(engine.call(go.wait))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        go.set()
        await busy


def resident() -> Resident:
    return from_floats(KEYS, VALUES, "fp32")


def dense(q: Floats, suffix: api.Suffix | None = None, window: int = 0) -> Dense:
    return Dense(Sizes("X", 2, 2, 32, window), q, None, suffix, with_lse=True)


def test_everything_runs_on_one_thread_in_order() -> None:
    async def work(engine: Engine) -> None:
        seen: list[tuple[int, str]] = []
        calls = [lambda n=n: seen.append((n, threading.current_thread().name)) for n in range(50)]
        await asyncio.gather(*(engine.call(one) for one in calls))
        assert [n for n, _ in seen] == list(range(50))
        assert len({name for _, name in seen}) == 1
        assert seen[0][1] != threading.current_thread().name
        assert engine.queries == 0

    run(work)


@pytest.mark.parametrize("suffix", [0, 5])
def test_waiting_queries_of_one_layer_share_a_pass_and_are_right(suffix: int) -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        more = [(normal(50 + n, 2, suffix, 32), normal(80 + n, 2, suffix, 32)) for n in range(9)]
        queries = [normal(10 + n, 2, 1, 32) for n in range(9)]
        requests = [
            dense(q, api.Suffix(*one) if suffix else None)
            for q, one in zip(queries, more, strict=True)
        ]
        async with held_up(engine):
            waiting = [engine.begin(request.bound(slot)) for request in requests]
            await asyncio.sleep(0.05)
            assert not any(one.done() for one in waiting)
        found = await asyncio.gather(*waiting)
        assert (engine.queries, engine.shared_passes) == (9, 1)
        for request, (out,) in zip(requests, found, strict=True):
            (alone,) = await engine.begin(request.bound(slot))
            assert out.tobytes() == alone.tobytes()
        for q, one, (out,) in zip(queries, more, found, strict=True):
            wanted = oracle.fused(q, (KEYS, VALUES), one)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)

    run(work)


def test_batches_that_share_a_pass_keep_their_own_log_sum_exp() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        queries = [normal(n, 2, rows, 32) for n, rows in enumerate((3, 1, 16, 2))]
        async with held_up(engine):
            waiting = [engine.begin(dense(q).bound(slot)) for q in queries]
            await asyncio.sleep(0.05)
        assert engine.queries + sum(not one.done() for one in waiting) >= 4
        for q, arrays in zip(queries, await asyncio.gather(*waiting), strict=True):
            out, lse = oracle.dense(q, KEYS, VALUES)
            np.testing.assert_allclose(arrays[0], out, rtol=0, atol=1e-5)
            assert len(arrays) == (1 if q.shape[1] == 1 else 2)
            if len(arrays) == 2:
                np.testing.assert_allclose(arrays[1], lse, rtol=0, atol=1e-5)
        assert engine.shared_passes == 1

    run(work)


def test_what_differs_shares_nothing() -> None:
    async def work(engine: Engine) -> None:
        slot, other = resident(), resident()
        q = normal(3, 2, 1, 32)
        mapped = Dense(Sizes("X", 2, 2, 32, 0), q, np.array([1, 0], np.uint8), None)
        bounds = [
            dense(q).bound(slot),
            dense(q).bound(other),
            dense(q, window=50).bound(slot),
            mapped.bound(slot),
            dense(normal(4, 2, 40, 32)).bound(slot),
        ]
        async with held_up(engine):
            waiting = [engine.begin(one) for one in bounds]
            await asyncio.sleep(0.05)
        found = await asyncio.gather(*waiting)
        assert (engine.queries, engine.shared_passes) == (5, 0)
        np.testing.assert_allclose(
            found[2][0], oracle.dense(q, KEYS, VALUES, window=50)[0], rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(
            found[3][0], oracle.dense(q, KEYS, VALUES, [1, 0])[0], rtol=0, atol=1e-5
        )

    run(work)


def test_nan_of_one_client_stays_out_of_the_others_answers() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        queries = [normal(20 + n, 2, 1, 32) for n in range(4)]
        queries[1][0, 0, 3] = np.nan
        async with held_up(engine):
            waiting = [engine.begin(dense(q).bound(slot)) for q in queries]
            await asyncio.sleep(0.05)
        found = [arrays[0] for arrays in await asyncio.gather(*waiting)]
        assert engine.shared_passes == 1
        assert np.isnan(found[1][0]).all() and not np.isnan(found[1][1]).any()
        for n in (0, 2, 3):
            wanted, _ = oracle.dense(queries[n], KEYS, VALUES)
            np.testing.assert_allclose(found[n], wanted, rtol=0, atol=1e-5)

    run(work)


def test_a_pass_has_an_end() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        count = MAX_ROWS * 2 + 3
        async with held_up(engine):
            waiting = [engine.begin(dense(normal(n, 2, 1, 32)).bound(slot)) for n in range(count)]
            await asyncio.sleep(0.05)
        await asyncio.gather(*waiting)
        assert (engine.queries, engine.shared_passes) == (count, 3)

    run(work)


def test_a_query_that_fails_fails_alone() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        good, bad = dense(normal(5, 2, 1, 32)), dense(normal(6, 2, 1, 32), api.Suffix(KEYS, KEYS))
        broken = Dense(bad.sizes, bad.q, None, api.Suffix(KEYS[:1], KEYS[:1]))
        async with held_up(engine):
            waiting = [engine.begin(one.bound(slot)) for one in (good, broken, good)]
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[1], CommandError)
        for answer in (answers[0], answers[2]):
            assert isinstance(answer, list)
            wanted, _ = oracle.dense(good.q, KEYS, VALUES)
            np.testing.assert_allclose(answer[0], wanted, rtol=0, atol=1e-5)

    run(work)


def test_who_has_left_is_not_waited_for() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        async with held_up(engine):
            gone = engine.begin(dense(normal(7, 2, 1, 32)).bound(slot))
            stays = engine.begin(dense(normal(8, 2, 1, 32)).bound(slot))
            await asyncio.sleep(0)
            gone.cancel()
        assert (await stays)[0].shape == (2, 1, 32)
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(work)


def test_the_last_query_keeps_nothing_of_its_layer() -> None:
    async def work(engine: Engine) -> None:
        slot = resident()
        held = weakref.ref(slot.prefix)
        await engine.begin(dense(normal(3, 2, 1, 32)).bound(slot))
        del slot
        ends_at = time.monotonic() + 10
        while held() is not None and time.monotonic() < ends_at:
            await asyncio.sleep(0.01)  # the thread is just going back to its queue
        assert held() is None

    run(work)


def test_what_nobody_waits_for_any_more_is_not_computed() -> None:
    async def work(engine: Engine) -> None:
        computed: list[int] = []
        async with held_up(engine):
            calls = [engine.begin(Call(lambda n=n: computed.append(n))) for n in range(6)]
            for gone in calls[::2]:
                gone.cancel()
        await asyncio.gather(*calls[1::2])
        assert computed == [1, 3, 5]

    run(work)


class Watched(np.ndarray[Any, Any]):
    """An array that remembers on which threads somebody computed with it."""

    threads: ClassVar[list[str]] = []

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        plain = [np.asarray(one) for one in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return super().__array_function__(function, types, args, kwargs)


@pytest.mark.parametrize("absent", [0, 40])
def test_indices_are_looked_at_on_the_thread_alone(absent: int) -> None:
    async def work(engine: Engine) -> None:
        Watched.threads.clear()
        slot = from_floats(KEYS, VALUES, "fp32", absent)
        indices = np.arange(absent, absent + 200, dtype=np.int32)[None].repeat(2, axis=0)
        sizes, counts = Sizes("X", 2, 2, 32, 150), np.array([200, 7], np.uint32)
        q = normal(3, 2, 32)
        asked = Sparse(sizes, q, indices.view(Watched), counts)
        pending = engine.begin(asked.bound(slot))
        assert Watched.threads == [] or set(Watched.threads) == {"attention"}
        (found,) = await pending
        assert set(Watched.threads) == {"attention"}
        wanted, _ = oracle.dense(q[:1, None], KEYS[:1, -150:], VALUES[:1, -150:])
        np.testing.assert_allclose(found[:1], wanted[:, 0], rtol=0, atol=1e-5)

    run(work)


def test_an_index_outside_is_refused_by_the_thread() -> None:
    async def work(engine: Engine) -> None:
        sizes, counts = Sizes("X", 2, 2, 32, 0), np.array([1, 1], np.uint32)
        asked = Sparse(sizes, normal(3, 2, 32), np.array([[3], [200]], np.int32), counts)
        bound = asked.bound(resident())  # nobody has looked
        with pytest.raises(CommandError, match="an index is outside of the prefix"):
            await engine.begin(bound)

    run(work)


def odd(array: Floats) -> memoryview:
    """The bytes of an array, from an odd address on."""
    memory = np.empty(array.nbytes + 8, np.uint8)
    first = 1 - memory.ctypes.data % 4 + 4
    memory[first : first + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return memory[first : first + array.nbytes].data


@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_what_begins_between_two_words_is_copied_by_the_thread(rows: int) -> None:
    async def work(engine: Engine) -> None:
        sizes = Sizes("X", 2, 2, 32, 0)
        q, keys, values = normal(1, 2, rows, 32), normal(2, 2, 5, 32), normal(3, 2, 5, 32)
        blobs = [odd(one) for one in (q, keys, values)]
        suffix = sizes.suffix(5, *blobs[1:])
        assert suffix is not None
        asked = Dense(sizes, sizes.queries(blobs[0]), None, suffix, with_lse=True)
        arrays = (asked.q, suffix.keys, suffix.values)
        for array, blob in zip(arrays, blobs, strict=True):
            assert np.shares_memory(array, np.frombuffer(blob, np.uint8))
            assert not array.flags.aligned
        async with held_up(engine):
            waiting = [engine.begin(asked.bound(resident())) for _ in range(2)]
            assert not any(one.done() for one in waiting)
        for found in await asyncio.gather(*waiting):
            wanted = oracle.fused(q, (KEYS, VALUES), (keys, values))
            np.testing.assert_allclose(found[0], wanted, rtol=0, atol=1e-5)
        selection = api.Selection(16, 2)
        one, whole = (Auto(sizes, array[:, 0], None, selection, suffix) for array in (asked.q, q))
        odd_found, found = [await engine.begin(auto.bound(resident())) for auto in (one, whole)]
        np.testing.assert_array_equal(odd_found[0], found[0])

    run(work)
