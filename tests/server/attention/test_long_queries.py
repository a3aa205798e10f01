"""Queries of many tokens: computed in parts, in bounded memory, while others have their turn."""

from __future__ import annotations

import asyncio
import select
import tracemalloc
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.server.attention import placement
from pion_vllm_mlx.server.attention.engine import Engine, Progress
from pion_vllm_mlx.server.attention.parts import Extent
from pion_vllm_mlx.server.attention.requests import BoundDense, Dense, LongDense, Sizes
from pion_vllm_mlx.server.attention.resident import from_floats
from tests.conftest import RunningServer
from tests.server.attention import oracle
from tests.server.attention.asking import Floats, connected, floats, normal
from tests.server.attention.test_engine import held_up, run
from tests.server.wire import request

HEADS, DIM = 2, 32
KEYS, VALUES = normal(1, HEADS, 300, DIM), normal(2, HEADS, 300, DIM)
MANY = 10_000  # queries of HEADS and DIM, in more than two parts
MAP = bytes(range(HEADS))


def dense(
    q: Floats,
    suffix: api.Suffix | None = None,
    head_map: list[int] | None = None,
    window: int = 0,
) -> Dense:
    named = None if head_map is None else np.array(head_map, np.uint8)
    return Dense(Sizes("X", len(q), HEADS, DIM, window), q, named, suffix, with_lse=True)


def long(asked: Dense, prefix: tuple[Floats, Floats] = (KEYS, VALUES)) -> LongDense:
    bound = asked.bound(from_floats(*prefix, "fp32"))
    assert isinstance(bound, LongDense)
    return bound


def computed(work: LongDense) -> tuple[int, list[Floats]]:
    """How many parts there were, and the arrays of the reply."""
    count = 1
    while (found := work.alone()) is Progress.UNFINISHED:
        count += 1
    assert isinstance(found, list)
    return count, found


@pytest.mark.parametrize("suffix", [0, 1, 150, 350, 500, 577])
@pytest.mark.parametrize(
    ("head_map", "window"), [(None, 0), (None, 11), ([0, 0, 1, 1], 0), ([1, 0, 1], 0)]
)
def test_each_row_is_what_it_is_when_all_are_computed_at_once(
    suffix: int, head_map: list[int] | None, window: int
) -> None:
    rows = 500
    q = normal(3, len(head_map or MAP), rows, DIM)
    more = normal(4, HEADS, suffix, DIM), normal(5, HEADS, suffix, DIM)
    asked = dense(q, api.Suffix(*more) if suffix else None, head_map, window)
    whole = asked.bound(from_floats(KEYS, VALUES, "fp32"))
    assert isinstance(whole, BoundDense)
    edges = sorted({0, 130, 131, 260, 390, min(suffix, rows), rows})
    parts, (out, lse) = computed(LongDense(whole, list(pairwise(edges))))
    assert parts == len(edges) - 1
    found = whole.attended()
    np.testing.assert_allclose(out, found.out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse, found.lse, rtol=0, atol=5e-6)
    for m in {0, 130, 259, min(suffix, rows - 1), max(0, suffix - 1) % rows, rows - 1}:
        seen = min(suffix, max(0, suffix - rows) + m + 1)
        keys, values = (side[:, :seen] for side in more)
        wanted = oracle.fused(q[:, m : m + 1], (KEYS, VALUES), (keys, values), head_map, window)
        np.testing.assert_allclose(out[:, m : m + 1], wanted, rtol=0, atol=1e-5)


def test_a_suffix_without_tokens_is_none() -> None:
    q, nothing = normal(3, HEADS, 40, DIM), np.empty((HEADS, 0, DIM), np.float32)
    spans = [(0, 20), (20, 40)]
    replies = []
    for suffix in (None, api.Suffix(nothing, nothing)):
        whole = dense(q, suffix).bound(from_floats(KEYS, VALUES, "fp32"))
        assert isinstance(whole, BoundDense)
        replies.append(computed(LongDense(whole, spans))[1])
    for with_none, with_empty in zip(*replies, strict=True):
        np.testing.assert_allclose(with_empty, with_none, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spans", [[(0, 40)], [(0, 5), (5, 40)]])
def test_a_part_of_which_only_some_queries_see_the_whole_suffix_is_none(
    spans: list[tuple[int, int]],
) -> None:
    suffix = api.Suffix(KEYS[:, :10], VALUES[:, :10])
    whole = dense(normal(3, HEADS, 40, DIM), suffix).bound(from_floats(KEYS, VALUES, "fp32"))
    assert isinstance(whole, BoundDense)
    with pytest.raises(ValueError, match="different parts of 10 tokens"):
        computed(LongDense(whole, spans))


@pytest.mark.parametrize("device", ["host", "mlx"])
def test_a_row_of_many_is_what_it_is_alone(device: str) -> None:
    q = normal(3, HEADS, MANY, DIM)
    resident = from_floats(KEYS, VALUES, "fp32")
    if device == "mlx":
        pytest.importorskip("mlx.core")
        resident = placement.on_device(resident)
    bound = dense(q).bound(resident)
    assert isinstance(bound, LongDense)
    parts, (out, lse) = computed(bound)
    assert parts > 2
    wanted, sums = oracle.dense(q[:, ::999].copy(), KEYS, VALUES)
    np.testing.assert_allclose(out[:, ::999], wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[:, ::999], sums, rtol=0, atol=1e-5)


def test_parts_cover_every_query_once_and_are_as_small_as_is_said() -> None:
    sizes = (1, 31, 1000, 20_000)
    for queries in sizes:
        for suffix in (0, 5, 900, 20_001):
            for heads, kv_heads in ((1, 1), (8, 8), (32, 4), (3, 2)):
                for seen in (1, 4096, 1 << 20):
                    extent = Extent(heads, kv_heads, queries, suffix, 128, seen)
                    spans = extent.spans()
                    ends = [0, *(end for _, end in spans)]
                    assert [first for first, _ in spans] == ends[:-1] and ends[-1] == queries
                    assert all(0 < end - first <= extent.most for first, end in spans)


def test_a_query_of_few_tokens_is_one_part() -> None:
    bound = dense(normal(6, HEADS, 64, DIM)).bound(from_floats(KEYS, VALUES, "fp32"))
    assert isinstance(bound, BoundDense)


def test_memory_is_bounded_however_many_queries_there_are() -> None:
    """At once it would be some 300 MB; what a part takes grows with the processor's cores."""
    prefix = normal(7, HEADS, 2048, DIM), normal(8, HEADS, 2048, DIM)
    work = long(dense(normal(9, HEADS, 40_000, DIM)), prefix)
    tracemalloc.start()
    try:
        _, arrays = computed(work)
        peak = tracemalloc.get_traced_memory()[1] - sum(one.nbytes for one in arrays)
    finally:
        tracemalloc.stop()
    assert peak < 96 << 20


def order_of(work: Callable[[Engine], Coroutine[Any, Any, list[asyncio.Future[Any]]]]) -> list[int]:
    """In which order what is begun, while the thread is busy, is done."""
    order: list[int] = []

    async def inside(engine: Engine) -> None:
        async with held_up(engine):
            begun = await work(engine)
            for number, one in enumerate(begun):
                one.add_done_callback(lambda _, number=number: order.append(number))
            await asyncio.sleep(0.05)
        await asyncio.gather(*begun)

    run(inside)
    return order


def test_a_short_query_is_answered_before_a_long_one_that_came_first() -> None:
    async def work(engine: Engine) -> list[asyncio.Future[Any]]:
        short = dense(normal(10, HEADS, 1, DIM)).bound(from_floats(KEYS, VALUES, "fp32"))
        return [engine.begin(long(dense(normal(9, HEADS, MANY, DIM)))), engine.begin(short)]

    assert order_of(work) == [1, 0]


def test_long_queries_take_turns() -> None:
    async def work(engine: Engine) -> list[asyncio.Future[Any]]:
        counts = (5 * MANY, 2 * MANY, MANY)
        return [engine.begin(long(dense(normal(9, HEADS, count, DIM)))) for count in counts]

    assert order_of(work) == [2, 1, 0]


def test_a_long_query_that_nobody_waits_for_any_more_is_given_up_between_its_parts() -> None:
    class Counted(LongDense):
        parts = 0

        def alone(self) -> Any:
            self.parts += 1
            loop.call_soon_threadsafe(begun.cancel)
            return super().alone()

    async def inside(engine: Engine) -> None:
        nonlocal loop, begun
        loop = asyncio.get_running_loop()
        asked = dense(normal(9, HEADS, 20 * MANY, DIM))
        whole = long(asked)._whole
        work = Counted(whole, whole.extent.spans())
        begun = engine.begin(work)
        with pytest.raises(asyncio.CancelledError):
            await begun
        await engine.call(lambda: None)
        seen = work.parts
        for _ in range(5):
            await engine.call(lambda: None)
        assert work.parts == seen < len(whole.extent.spans())
        assert engine.queries == 0

    loop: asyncio.AbstractEventLoop
    begun: asyncio.Future[Any]
    run(inside)


def test_what_a_part_raises_is_raised_once_and_the_engine_goes_on() -> None:
    async def inside(engine: Engine) -> None:
        broken = long(dense(normal(9, HEADS, MANY, DIM), api.Suffix(KEYS[:1], VALUES[:1])))
        with pytest.raises(Exception, match="suffix"):
            await engine.begin(broken)
        short = dense(normal(10, HEADS, 1, DIM)).bound(from_floats(KEYS, VALUES, "fp32"))
        assert (await engine.begin(short))[0].shape == (HEADS, 1, DIM)

    run(inside)


def test_another_client_is_answered_while_a_long_query_is_computed(shared: RunningServer) -> None:
    prefix = normal(11, HEADS, 4096, DIM), normal(12, HEADS, 4096, DIM)
    q, one = normal(13, HEADS, 20_000, DIM), normal(14, HEADS, 1, DIM)
    words = ("ATTEND.PREFIX.QUERY", "long", 0, HEADS, DIM, 1, q.tobytes())
    wanted, _ = oracle.dense(one, *prefix)
    with connected(shared, "long") as asking, connected(shared, "long") as beside:
        asking.store(*prefix)
        asking.wire.send(request(*words))
        answered = 0
        while not select.select([asking.wire.sock], [], [], 0)[0]:
            answer = beside.query(one)
            answered += not select.select([asking.wire.sock], [], [], 0)[0]
            np.testing.assert_allclose(floats(answer, *one.shape), wanted, rtol=0, atol=1e-5)
        answer = asking.wire.reply()
        assert answered > 2, "the long query came first"
        rows = slice(0, 20_000, 4999)
        wanted, _ = oracle.dense(q[:, rows].copy(), *prefix)
        out = floats(answer[: q.nbytes], *q.shape)
        np.testing.assert_allclose(out[:, rows], wanted, rtol=0, atol=1e-5)
        asking.store(*(side[:, :1].copy() for side in prefix))


def test_both_lanes_answer_a_long_query_with_the_same_bytes(shared: RunningServer) -> None:
    with connected(shared, "both lanes") as asking:
        asking.store(KEYS, VALUES)
        q = normal(15, HEADS, MANY, DIM)
        answers = []
        for tokens in (0, 40, MANY):
            suffix = normal(16, HEADS, tokens, DIM), normal(17, HEADS, tokens, DIM)
            answers.append(asking.fused(q, *suffix, MAP))
            assert asking.framed_ok(q, suffix, MAP) == answers[-1]
        assert asking.query(q)[: q.nbytes] == answers[0]
