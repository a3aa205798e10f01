"""What holds between kernels: merges, sparse against dense, needles, NaN, byte equality."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.kernels import api, threads, transfer
from pion_vllm_mlx.kernels.api import Attended, Prefix, Selection, Suffix
from pion_vllm_mlx.kernels.threads import cores, in_threads
from pion_vllm_mlx.kernels.widening import widened
from tests.kernels import cases


@pytest.fixture(params=["reference", "cpu", "mlx"])
def to(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each implementation in turn; gives the function that makes its kind of array."""
    monkeypatch.setenv("PION_KERNEL", request.param)
    if request.param != "mlx":
        return lambda array: array
    pytest.importorskip("mlx.core")
    return transfer.to_mlx


def host(found: Attended) -> tuple[Any, Any]:
    return transfer.to_host(found.out), transfer.to_host(found.lse)


def dense(keys: Any, values: Any, to: Any) -> Prefix:
    return api.dense_prefix(to(np.ascontiguousarray(keys)), to(np.ascontiguousarray(values)))


def test_merging_any_split_equals_the_unsplit_result(to: Any, rng: np.random.Generator) -> None:
    keys, values = rng.standard_normal((2, 3, 500, 64)).astype(np.float32)
    q = to(3 * rng.standard_normal((3, 5, 64)).astype(np.float32))
    whole = host(api.attend(q, dense(keys, values, to)))
    for num_cuts in (1, 2, 7):
        cuts = np.sort(rng.choice(np.arange(1, 500), num_cuts, replace=False)).tolist()
        parts = [
            api.attend(q, dense(keys[:, first:end], values[:, first:end], to))
            for first, end in zip([0, *cuts], [*cuts, 500], strict=True)
        ]
        out, lse = host(api.merge(parts))
        np.testing.assert_allclose(out, whole[0], atol=1e-5)
        np.testing.assert_allclose(lse, whole[1], atol=1e-5)


@pytest.mark.parametrize("stored", cases.STORED)
def test_several_at_once_are_each_as_alone_to_the_bit(
    to: Any, rng: np.random.Generator, stored: str
) -> None:
    head_map = np.array([0, 0, 1, 1], np.uint8)
    prefix = prefix_in(cases.prefix(rng, (2, 5000, 64), stored), to)
    asked: list[tuple[Any, Suffix | None]] = []
    for rows, tokens in ((1, 0), (1, 3), (1, 3), (1, 700), (3, 0), (3, 5), (17, 2)):
        tail = [to(cases.values(rng, (2, tokens, 64), "fp32")) for _ in range(2)]
        q = to(cases.values(rng, (4, rows, 64), "fp32"))
        asked.append((q, Suffix(*tail) if tokens else None))
    for window in (0, 1300):
        found = api.attend_each(asked, prefix, head_map, window)
        for (q, suffix), one in zip(asked, found, strict=True):
            alone = api.attend_fused(q, prefix, suffix, head_map, window)
            known = api.repeated(q, prefix, head_map, window)
            again = [] if known is None else [known(q, suffix)]
            for other in (one, *again):
                for mine, theirs in zip(host(other), host(alone), strict=True):
                    assert mine.tobytes() == theirs.tobytes()


def test_a_query_that_is_repeated_is_checked_where_it_differs(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 100, 64), "fp32")
    q = cases.values(rng, (2, 1, 64), "fp32")
    known = api.repeated(q, prefix)
    assert known is not None
    for shape in ((1, 3, 64), (2, 3, 32), (2, 3, 64, 1)):
        wrong = cases.values(rng, shape, "fp32")
        with pytest.raises(CommandError, match="shape mismatch: suffix"):
            known(q, Suffix(wrong, wrong))
    for stored in ("fp16", "bf16"):
        tail = Suffix(*(cases.values(rng, (2, 5, 64), stored) for _ in range(2)))
        found, alone = known(q, tail), api.attend_fused(q, prefix, tail)
        assert found.out.tobytes() == alone.out.tobytes()


def test_a_part_that_saw_nothing_adds_nothing(to: Any, rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 30, 32), "fp32")
    full = api.attend(to(cases.values(rng, (2, 32), "fp32")), prefix_in(prefix, to))
    nothing = to(np.full((2, 32), np.nan, np.float32)), to(np.full(2, -np.inf, np.float32))
    out, lse = host(api.merge([full, Attended(*nothing)]))
    np.testing.assert_allclose(out, host(full)[0], atol=1e-6)
    np.testing.assert_allclose(lse, host(full)[1], atol=1e-6)
    out, lse = host(api.merge([Attended(*nothing), Attended(*nothing)]))
    assert (out == 0).all() and (lse == -np.inf).all()


def prefix_in(prefix: Prefix, to: Any) -> Prefix:
    return Prefix(to(prefix.keys), to(prefix.values), prefix.num_tokens, prefix.table)


def test_a_fused_query_equals_one_over_the_joined_tokens(to: Any, rng: np.random.Generator) -> None:
    keys, values = rng.standard_normal((2, 2, 320, 64)).astype(np.float32)
    q = to(rng.standard_normal((4, 1, 64)).astype(np.float32))
    heads = [0, 0, 1, 1]
    suffix = Suffix(to(keys[:, 300:].copy()), to(values[:, 300:].copy()))
    fused = host(api.attend_fused(q, dense(keys[:, :300], values[:, :300], to), suffix, heads))
    joined = host(api.attend(q, dense(keys, values, to), heads))
    np.testing.assert_allclose(fused[0], joined[0], atol=1e-5)
    np.testing.assert_allclose(fused[1], joined[1], atol=1e-5)


@pytest.mark.parametrize("selector", ["mean", "quest"])
def test_sparse_with_all_blocks_equals_dense(
    to: Any, selector: Any, rng: np.random.Generator
) -> None:
    # six tokens more than all blocks hold: with them alone the dense kernels would be asked
    prefix = prefix_in(cases.prefix(rng, (4, 1030, 128), "fp32"), to)
    q = to(cases.values(rng, (4, 128), "fp32"))
    selection = Selection(64, 16, selector)
    whole = host(api.attend(q, prefix))
    found = host(api.attend_sparse_auto(q, prefix, selection))
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(found[1], whole[1], atol=1e-5)
    assert prefix.statistics  # the blocks were chosen, and attended one by one
    suffix = api.Suffix(*(to(cases.values(rng, (4, 9, 128), "fp32")) for _ in range(2)))
    whole = host(api.attend_fused(q, prefix, suffix))
    found = host(api.attend_sparse_auto_fused(q, prefix, suffix, selection))
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    prefix = prefix_in(cases.prefix(rng, (4, 1024, 128), "fp32"), to)
    whole = host(api.attend(q, prefix))
    found = host(api.attend_sparse_auto(q, prefix, selection))
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    every = np.tile(rng.permutation(1024).astype(np.int32), (4, 1))
    found = host(api.attend_sparse(q, prefix, every, np.full(4, 1024, np.uint32)))
    np.testing.assert_allclose(found[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(found[1], whole[1], atol=1e-5)


@pytest.mark.parametrize("selector", ["mean", "quest"])
def test_a_needle_block_is_found_and_says_all(
    to: Any, selector: Any, rng: np.random.Generator
) -> None:
    keys = 0.3 * rng.standard_normal((2, 2048, 64)).astype(np.float32)
    values = rng.standard_normal((2, 2048, 64)).astype(np.float32)
    q = rng.standard_normal((2, 64)).astype(np.float32)
    keys[:, 640:704] += 3 * q[:, None] / np.linalg.norm(q, axis=-1)[:, None, None] * 4
    prefix = dense(keys, values, to)
    assert 10 in transfer.to_host(api.select_blocks(to(q), prefix, Selection(64, 2, selector)))
    whole, _ = host(api.attend(to(q), prefix))
    found, _ = host(api.attend_sparse_auto(to(q), prefix, Selection(64, 2, selector)))
    cosine = (whole * found).sum() / np.linalg.norm(whole) / np.linalg.norm(found)
    assert cosine >= 0.99


def test_the_selectors_differ_where_a_mean_hides_a_peak(to: Any) -> None:
    keys = np.zeros((1, 128, 32), np.float32)
    keys[0, :64] = 1.0  # a block good on average
    keys[0, 64:96], keys[0, 96:] = 9.0, -9.0  # and one whose mean is 0, with high peaks
    values = np.arange(128, dtype=np.float32)[None, :, None] * np.ones((1, 1, 32), np.float32)
    prefix = dense(keys, values, to)
    q = to(np.ones((1, 32), np.float32))
    chosen = {
        selector: transfer.to_host(
            api.select_blocks(q, prefix, Selection(64, 1, selector))
        ).tolist()
        for selector in ("mean", "quest")
    }
    assert chosen == {"mean": [0], "quest": [1]}
    outs = [
        host(api.attend_sparse_auto(q, prefix, Selection(64, 1, selector)))[0]
        for selector in ("mean", "quest")
    ]
    assert np.abs(outs[0] - outs[1]).max() > 1


@pytest.mark.parametrize("num_queries", [None, 3])
def test_a_nan_in_a_row_of_q_stays_in_its_row(
    to: Any, num_queries: int | None, rng: np.random.Generator
) -> None:
    prefix = prefix_in(cases.prefix(rng, (2, 200, 64), "fp32"), to)
    suffix = cases.suffix(rng, (2, 5, 64))
    suffix = Suffix(to(suffix.keys), to(suffix.values))
    shape = (4, 64) if num_queries is None else (4, num_queries, 64)
    q = cases.values(rng, shape, "fp32")
    bad = q.copy()
    row = (1,) if num_queries is None else (1, 1)
    bad[(*row, 7)] = np.nan
    heads = [0, 0, 1, 1]
    clean = host(api.attend_fused(to(q), prefix, suffix, heads))
    found = host(api.attend_fused(to(bad), prefix, suffix, heads))
    others = np.ones(shape[:-1], bool)
    others[row] = False
    for one, other in zip(clean, found, strict=True):
        assert np.isnan(other[row]).all()
        np.testing.assert_allclose(other[others], one[others], atol=1e-6)


def test_a_nan_in_q_stays_in_its_head_of_sparse_queries(to: Any, rng: np.random.Generator) -> None:
    prefix = prefix_in(cases.prefix(rng, (2, 200, 64), "fp32"), to)
    q = cases.values(rng, (2, 64), "fp32")
    q[1, 3] = np.nan
    indices = rng.integers(0, 200, (2, 9)).astype(np.int32)
    for found in (
        api.attend_sparse(to(q), prefix, indices, np.array([9, 9])),
        api.attend_sparse_auto(to(q), prefix, Selection(16, 3)),
    ):
        out, lse = host(found)
        assert np.isfinite(out[0]).all() and np.isfinite(lse[0])
        assert np.isnan(out[1]).all() and np.isnan(lse[1])


def test_a_head_with_no_token_left_gets_zeros(to: Any, rng: np.random.Generator) -> None:
    prefix = prefix_in(cases.prefix(rng, (3, 50, 32), "fp32"), to)
    q = to(cases.values(rng, (3, 32), "fp32"))
    indices = np.array([[1, 2], [45, 2], [3, 4]], np.int32)
    out, lse = host(api.attend_sparse(q, prefix, indices, np.array([2, 2, 0]), window=10))
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -np.inf).all()
    np.testing.assert_allclose(out[1], transfer.to_host(prefix.values)[1, 45], atol=1e-6)
    out, lse = host(api.attend_sparse(q, prefix, np.zeros((3, 0), np.int32), np.zeros(3, int)))
    assert (out == 0).all() and (lse == -np.inf).all()


def test_scores_of_hundreds_do_not_overflow(to: Any, rng: np.random.Generator) -> None:
    keys, values = rng.standard_normal((2, 1, 300, 64)).astype(np.float32)
    q = to(500 * keys[:, 17])
    out, lse = host(api.attend(q, dense(keys, values, to)))
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out[0], values[0, 17], atol=1e-5)


def test_q_of_numpy_over_an_mlx_prefix_comes_back_as_numpy(rng: np.random.Generator) -> None:
    pytest.importorskip("mlx.core")
    prefix = cases.prefix(rng, (2, 40, 32), "bf16")
    q, suffix = cases.values(rng, (2, 32), "fp32"), cases.suffix(rng, (2, 3, 32))
    expected = api.attend_fused(q, prefix, suffix)
    found = api.attend_fused(q, prefix_in(prefix, transfer.to_mlx), suffix)
    assert isinstance(found.out, np.ndarray)
    np.testing.assert_allclose(found.out, expected.out, atol=1e-5)


@pytest.mark.parametrize("stored", ["fp32", "bf16", "4 bits of 32"])
def test_equal_requests_give_equal_bytes_from_any_thread(
    stored: str, rng: np.random.Generator
) -> None:
    prefix = cases.prefix(rng, (4, 3000, 64), stored)
    q = cases.values(rng, (8, 2, 64), "fp32")
    heads = np.repeat(np.arange(4), 2)

    def run(_: int) -> bytes:
        found = api.attend(q, prefix, heads)
        return bytes(found.out.tobytes() + found.lse.tobytes())

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(run, range(12)))) == 1


@pytest.mark.parametrize(("stored", "num_heads"), [("fp32", 8), ("fp32", 5), ("fp16", 8)])
def test_how_many_cores_there_are_does_not_change_a_byte(
    stored: str, num_heads: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of one query are dealt to cores, chunks of others."""
    prefix = cases.prefix(rng, (num_heads, 3500, 128), stored)
    suffix = cases.suffix(rng, (num_heads, 3, 128))
    q = cases.values(rng, (num_heads, 128), "fp32")
    found = set()
    for count in (1, 2, 3, 16):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        cores.cache_clear()
        attended = api.attend_fused(q, prefix, suffix)
        found.add(attended.out.tobytes() + attended.lse.tobytes())
    cores.cache_clear()
    assert len(found) == 1


def test_where_a_query_lies_in_memory_does_not_change_a_byte(rng: np.random.Generator) -> None:
    prefix = cases.prefix(rng, (2, 700, 64), "fp32")
    q = cases.values(rng, (2, 3, 64), "fp32")
    suffix = cases.suffix(rng, (2, 5, 64))
    expected = api.attend_fused(q, prefix, suffix)
    for offset in (1, 2, 4, 20):

        def shifted(array: Any, offset: int = offset) -> Any:
            room = bytes(offset) + array.tobytes()
            return np.frombuffer(room, np.float32, offset=offset).reshape(array.shape)

        moved = Suffix(shifted(suffix.keys), shifted(suffix.values))
        found = api.attend_fused(shifted(q), prefix, moved)
        assert found.out.tobytes() == expected.out.tobytes()
        assert found.lse.tobytes() == expected.lse.tobytes()


def test_an_error_in_a_thread_is_raised_and_every_item_is_done_once() -> None:
    done: list[int] = []

    def work(item: int) -> int:
        if item == 70:
            raise CommandError("seventy")
        done.append(item)
        return -item

    assert in_threads(range(60), work) == [-item for item in range(60)]
    assert sorted(done) == list(range(60))
    with pytest.raises(CommandError, match="seventy"):
        in_threads(range(50, 90), work)


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="has no two processors"
)
def test_helpers_keep_off_the_processor_that_calls_them() -> None:
    """They may run on any other of the caller's; where it has but one, they stay where they are."""
    mine = os.sched_getaffinity(0)

    def places() -> set[frozenset[int]]:
        meeting = threading.Barrier(2)

        def place(_: int) -> frozenset[int]:
            meeting.wait(10)
            return frozenset(os.sched_getaffinity(0))

        return set(in_threads(range(2), place)) - {frozenset(os.sched_getaffinity(0))}

    (helpers,) = places()
    assert helpers < mine and len(helpers) == len(mine) - 1
    for one in sorted(mine)[:2]:

        def from_one(one: int = one) -> set[frozenset[int]]:
            os.sched_setaffinity(0, {one})
            return places()

        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(from_one).result() <= {helpers}


def test_a_thread_that_is_told_to_end_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 4)
    raised: list[BaseException] = []

    def work(item: int) -> None:
        if threading.current_thread() is not caller:
            raise SystemExit(item)
        time.sleep(0.01)

    def call() -> None:
        with pytest.raises(SystemExit) as found:
            in_threads(range(20), work)
        raised.append(found.value)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert len(raised) == 1


def test_threads_that_wait_hold_nothing_of_what_they_did() -> None:
    items = [np.zeros(1) for _ in range(8)]
    held = [weakref.ref(item) for item in items]
    assert in_threads(tuple(items), lambda item: time.sleep(0.01)) == [None] * 8
    items.clear()
    ends_at = time.monotonic() + 10
    while any(one() is not None for one in held) and time.monotonic() < ends_at:
        time.sleep(0.01)  # one that came too late is just finding out
    gc.collect()
    assert [one() for one in held] == [None] * 8


def test_statistics_of_another_window_or_selector_are_not_mixed_up(
    to: Any, rng: np.random.Generator
) -> None:
    keys, values = rng.standard_normal((2, 2, 600, 32)).astype(np.float32)
    q, prefix = to(cases.values(rng, (2, 32), "fp32")), dense(keys, values, to)
    for window in (0, 500, 481, 300):
        for selection in (Selection(7, 5), Selection(7, 5, "quest"), Selection(9, 5)):
            found = api.select_blocks(q, prefix, selection, window=window)
            fresh = dense(keys, values, to)
            again = api.select_blocks(q, fresh, selection, window=window)
            assert transfer.to_host(found).tolist() == transfer.to_host(again).tolist()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_prefix_is_held_in_the_type_asked_for(
    to: Any, dtype: str, rng: np.random.Generator
) -> None:
    keys, values = rng.standard_normal((2, 2, 30, 32)).astype(np.float32)
    prefix = api.dense_prefix(to(keys), to(values), dtype)
    assert prefix.nbytes == 2 * keys.size * (4 if dtype == "fp32" else 2)
    out, _ = host(api.attend(to(cases.values(rng, (2, 32), "fp32")), prefix))
    assert np.isfinite(out).all()


def test_bf16_is_rounded_as_mlx_rounds_it(rng: np.random.Generator) -> None:
    mx = pytest.importorskip("mlx.core")
    values = rng.standard_normal((1, 64, 32)).astype(np.float32)
    values[0, 0, :4] = [np.inf, -np.inf, np.nan, 3.4e38]
    values.view(np.uint32)[0, 0, 4:6] = [0x7FFFFFFF, 0x7F800001]  # NaNs that rounding would lose
    found = api.dense_prefix(values, values, "bf16").keys
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(found[number], expected[number])
    assert np.isnan(transfer.converter(found, "fp32")(found)[~number]).all()


def test_merge_refuses_no_part_and_parts_that_differ() -> None:
    part = Attended(np.zeros((2, 32), np.float32), np.zeros(2, np.float32))
    other = Attended(np.zeros((3, 32), np.float32), np.zeros(3, np.float32))
    with pytest.raises(CommandError, match="no part"):
        api.merge([])
    with pytest.raises(CommandError, match="shape mismatch"):
        api.merge([part, other])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_half_precision_values_are_widened_exactly(bad: float, rng: np.random.Generator) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]  # subnormals and both zeros too
    np.testing.assert_array_equal(widened(finite), finite.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(widened(finite)), np.signbit(finite))
    np.testing.assert_array_equal(
        widened(np.array([1.0, bad], np.float16)), np.array([1.0, bad], np.float32)
    )


def test_long_arrays_are_converted_whole(rng: np.random.Generator) -> None:
    drawn = rng.standard_normal((3, 5000, 96)).astype(np.float32)  # of more than one run
    halves = api.dense_prefix(drawn, drawn, "fp16").keys
    np.testing.assert_array_equal(halves, drawn.astype(np.float16))
    bf16 = api.dense_prefix(drawn, drawn, "bf16").keys
    back = transfer.converter(bf16, "fp32")(bf16)
    np.testing.assert_allclose(back, drawn, rtol=2**-8)
    np.testing.assert_array_equal(transfer.converter(back, "bf16")(back), bf16)


@pytest.mark.parametrize("stored", ["fp32", "fp16", "bf16", "4 bits of 32", "8 bits of 32"])
def test_nothing_of_an_earlier_request_shows_in_a_later_one(
    stored: str, rng: np.random.Generator
) -> None:
    """Threads use their buffers again: requests of NaN first, then many kinds at once."""
    q = cases.values(rng, (8, 3, 64), "fp32")
    heads = np.repeat(np.arange(4), 2)
    prefixes = [cases.prefix(rng, (4, num, 64), stored, 16) for num in (40, 900, 2500)]
    expected = [api.attend(q, prefix, heads).out.tobytes() for prefix in prefixes]
    poison = np.full((4, 3000, 64), np.nan, np.float32)
    for dtype in ("fp32", "fp16", "bf16"):
        assert np.isnan(api.attend(q, api.dense_prefix(poison, poison, dtype), heads).out).all()
    with ThreadPoolExecutor(6) as threads:
        found = threads.map(
            lambda at: api.attend(q, prefixes[at % 3], heads).out.tobytes(), range(30)
        )
        assert list(found) == [expected[at % 3] for at in range(30)]
