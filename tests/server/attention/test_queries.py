"""Every query answers what plain float64 attention answers, and both lanes the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.server.attention import oracle
from tests.server.attention.asking import Asking, Floats, floats, normal
from tests.server.memory.lane import PING

DIMS = (32, 64, 96, 128, 160, 192, 256, 512)


def prefix(ask: Asking, seed: int, heads: int, tokens: int, dim: int) -> tuple[Floats, Floats]:
    """K and V, resident."""
    keys, values = normal(seed, heads, tokens, dim), normal(seed + 1, heads, tokens, dim)
    ask.store(keys, values)
    return keys, values


@pytest.mark.parametrize("dim", DIMS)
def test_one_query_is_float64_attention(ask: Asking, dim: int) -> None:
    keys, values = prefix(ask, dim, 3, 77, dim)
    q = normal(1, 3, 1, dim)
    out = floats(ask.query(q), 3, 1, dim)
    np.testing.assert_allclose(out, oracle.dense(q, keys, values)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 3, 16, 100])
def test_a_batch_carries_its_log_sum_exp(ask: Asking, rows: int) -> None:
    keys, values = prefix(ask, rows, 2, 300, 64)
    q = normal(3, 2, rows, 64)
    answer = ask.query(q)
    assert len(answer) == 4 * 2 * rows * (64 + 1)
    cut = 4 * 2 * rows * 64
    wanted, lse = oracle.dense(q, keys, values)
    np.testing.assert_allclose(floats(answer[:cut], 2, rows, 64), wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(floats(answer[cut:], 2, rows), lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 63, 64, 299])
def test_a_window_shows_the_last_tokens_of_the_prefix(ask: Asking, window: int) -> None:
    keys, values = prefix(ask, 5, 2, 300, 32)
    q = normal(6, 2, 1, 32)
    wanted, _ = oracle.dense(q, keys, values, window=window)
    np.testing.assert_allclose(floats(ask.query(q, window), 2, 1, 32), wanted, rtol=0, atol=1e-5)


def test_a_window_that_holds_the_prefix_is_none(ask: Asking) -> None:
    prefix(ask, 7, 2, 50, 32)
    q = normal(8, 2, 3, 32)
    whole = ask.query(q)
    for window in (-1, 0, 50, 51, 4_000_000_000):
        assert ask.query(q, window) == whole, window
    assert ask.query(q, 49) != whole


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("suffix", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fused_is_one_softmax_over_both_on_either_lane(
    ask: Asking, rows: int, suffix: int, kv_heads: int
) -> None:
    kept = prefix(ask, 10 + suffix, kv_heads, 130, 64)
    q = normal(20, 4, rows, 64)
    more = normal(21, kv_heads, suffix, 64), normal(22, kv_heads, suffix, 64)
    heads = [h * kv_heads // 4 for h in range(4)]
    for window in ((), (100,)):
        answer = ask.fused(q, *more, bytes(heads), *window)
        wanted = oracle.fused(q, kept, more, heads, *window)
        np.testing.assert_allclose(floats(answer, 4, rows, 64), wanted, rtol=0, atol=1e-5)
        assert ask.framed_ok(q, more, bytes(heads), *window) == answer
    if kv_heads == 4:
        assert ask.fused(q, *more, b"") == ask.fused(q, *more, bytes(heads))
        if suffix == 0 and rows == 1:
            assert ask.query(q) == ask.fused(q, *more, b"")


def test_a_map_may_skip_repeat_and_mix_heads(ask: Asking) -> None:
    kept = prefix(ask, 30, 3, 40, 32)
    more = normal(31, 3, 2, 32), normal(32, 3, 2, 32)
    q = normal(33, 5, 2, 32)
    heads = [2, 0, 2, 2, 0]
    answer = ask.fused(q, *more, bytes(heads))
    wanted = oracle.fused(q, kept, more, heads)
    np.testing.assert_allclose(floats(answer, 5, 2, 32), wanted, rtol=0, atol=1e-5)
    assert ask.framed_ok(q, more, bytes(heads)) == answer


def test_long_queries_cross_both_lanes_unchanged(ask: Asking) -> None:
    kept = prefix(ask, 34, 2, 600, 128)
    rows = 90
    q = normal(35, 2, rows, 128)
    more = normal(36, 2, rows, 128), normal(37, 2, rows, 128)
    answer = ask.fused(q, *more, b"")
    wanted = oracle.fused(q, kept, more)
    np.testing.assert_allclose(floats(answer, 2, rows, 128), wanted, rtol=0, atol=1e-5)
    assert ask.framed_ok(q, more, bytes([0, 1])) == answer
    assert ask.lane.ok(PING) == b""


def test_the_parts_of_a_split_prefix_merge_to_the_whole(ask: Asking) -> None:
    keys, values = normal(40, 2, 500, 64), normal(41, 2, 500, 64)
    q = normal(42, 2, 2, 64)
    whole, parts = ask.at(layer=0), []
    whole.store(keys, values)
    for layer, part in enumerate((slice(0, 123), slice(123, 500)), 1):
        one = ask.at(layer=layer)
        one.store(keys[:, part].copy(), values[:, part].copy())
        parts.append(one)
    cut = 4 * q.size
    answers = [one.query(q) for one in (whole, *parts)]
    out = [floats(answer[:cut], 2, 2, 64).astype("f8") for answer in answers]
    lse = [floats(answer[cut:], 2, 2).astype("f8") for answer in answers]
    top = np.maximum(lse[1], lse[2])
    weights = [np.exp(one - top)[..., None] for one in lse[1:]]
    merged = (out[1] * weights[0] + out[2] * weights[1]) / (weights[0] + weights[1])
    np.testing.assert_allclose(merged, out[0], rtol=0, atol=1e-5)


def test_the_bytes_of_the_protocols_example(ask: Asking) -> None:
    ask = ask.at("ns_attn")
    prefix(ask, 50, 2, 9, 64)
    q, nothing = np.zeros((4, 1, 64), "<f4"), np.zeros((2, 0, 64), "<f4")
    head = bytes.fromhex("5eca241d040000 0700 6e735f6174746e 0300 0400 4000 0200 01000000 00000000")
    ask.lane.sock.sendall(head + q.tobytes() + bytes([0, 0, 1, 1]))
    status, body = ask.lane.reply()
    assert (status, len(body)) == (0, 1024)
    assert body == ask.fused(q, nothing, nothing, bytes([0, 0, 1, 1]))
    head = bytes.fromhex("5eca2421040000") + head[7:]
    ask.lane.sock.sendall(head + q.tobytes() + bytes([0, 0, 1, 1]) + bytes.fromhex("00020000"))
    assert ask.lane.reply() == (status, body)


# -- sparse ----------------------------------------------------------------------------


def sparse(
    ask: Asking, q: Floats, indices: list[list[int]], counts: list[int], *window: int
) -> object:
    rows = np.array(indices, "<i4")
    heads, _, dim = q.shape
    blobs = q.tobytes(), rows.tobytes(), np.array(counts, "<u4").tobytes()
    return ask.command("QUERY_SPARSE", heads, dim, rows.shape[1], *blobs, *window)


def auto(  # noqa: PLR0913 - the arguments of the command
    ask: Asking,
    q: Floats,
    block: int,
    top: int,
    kv_heads: int,
    head_map: bytes = b"",
    *rest: int,
    suffix: tuple[Floats, Floats] | None = None,
) -> object:
    heads, _, dim = q.shape
    words = (heads, dim, block, top, kv_heads)
    if suffix is None:
        return ask.command("QUERY_SPARSE_AUTO", *words, q.tobytes(), head_map, *rest)
    blobs = q.tobytes(), suffix[0].tobytes(), suffix[1].tobytes(), head_map
    return ask.command("QUERY_SPARSE_AUTO_FUSED", *words, suffix[0].shape[1], *blobs, *rest)


def test_named_tokens_are_attended_head_by_head(ask: Asking) -> None:
    keys, values = prefix(ask, 60, 3, 90, 32)
    q = normal(61, 3, 1, 32)
    indices = [[5, 80, 0, 7], [89, 1, 2, 3], [4, 4, 4, 4]]
    counts = [3, 4, 0]
    out = floats(sparse(ask, q, indices, counts), 3, 32)
    for h, count in enumerate(counts):
        rows = indices[h][:count]
        wanted, _ = oracle.softmax_over(q[h, 0], keys[h, rows], values[h, rows])
        np.testing.assert_allclose(out[h], wanted, rtol=0, atol=1e-5)
    assert not out[2].any()
    again = sparse(ask, q, [[80, 5, 0, -9], [3, 2, 1, 89], [0] * 4], [3, 4, 0])
    np.testing.assert_allclose(floats(again, 3, 32), out, rtol=0, atol=1e-5)


def test_a_window_hides_named_tokens_before_it(ask: Asking) -> None:
    keys, values = prefix(ask, 62, 1, 90, 32)
    q = normal(63, 1, 1, 32)
    out = floats(sparse(ask, q, [[5, 79, 80, 89]], [4], 10), 32)
    wanted, _ = oracle.softmax_over(q[0, 0], keys[0, [80, 89]], values[0, [80, 89]])
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    assert not floats(sparse(ask, q, [[5, 79]], [2], 10), 32).any()


@pytest.mark.parametrize("selector", [(), (-1,), (-1, 0), (-1, 1), (150, 0), (150, 1)])
@pytest.mark.parametrize("suffix", [None, 0, 5])
def test_chosen_blocks_the_tail_and_a_suffix_are_one_softmax(
    ask: Asking, selector: tuple[int, ...], suffix: int | None
) -> None:
    keys, values = prefix(ask, 70, 2, 203, 32)
    q = normal(71, 4, 1, 32)
    heads = [0, 0, 1, 1]
    first = 203 - selector[0] if selector and selector[0] > 0 else 0
    quest = selector[1:] == (1,)
    seen = oracle.chosen_tokens(q[:, 0], keys, 16, 3, quest=quest, head_map=heads, first=first)
    assert len(seen) < 203 - first
    more = None
    if suffix is not None:
        more = normal(72, 2, suffix, 32), normal(73, 2, suffix, 32)
    answer = auto(ask, q, 16, 3, 2, bytes(heads), *selector, suffix=more)
    empty = normal(0, 2, 0, 32), normal(0, 2, 0, 32)
    wanted = oracle.fused(q, (keys[:, seen], values[:, seen]), more or empty, heads)
    np.testing.assert_allclose(floats(answer, 4, 1, 32), wanted, rtol=0, atol=1e-5)


def test_all_blocks_are_dense_attention(ask: Asking) -> None:
    prefix(ask, 74, 4, 1024, 128)
    q = normal(75, 4, 1, 128)
    every = np.tile(np.arange(1024), (4, 1)).tolist()
    dense = floats(ask.query(q), 4, 128)
    for answer in (
        auto(ask, q, 64, 16, 4),
        auto(ask, q, 64, 99, 4),
        sparse(ask, q, every, [1024] * 4),
    ):
        np.testing.assert_allclose(floats(answer, 4, 128), dense, rtol=0, atol=1e-6)
    # with a tail behind all blocks the blocks are chosen, not taken for the whole
    prefix(ask, 76, 4, 1030, 128)
    before = ask.info()["sdpa_bytes"]
    dense, found = (floats(one, 4, 128) for one in (ask.query(q), auto(ask, q, 64, 16, 4)))
    np.testing.assert_allclose(found, dense, rtol=0, atol=1e-6)
    assert ask.info()["sdpa_bytes"] > before


def test_a_needle_is_found_by_two_blocks(ask: Asking) -> None:
    keys, values = normal(76, 2, 512, 64) * np.float32(0.1), normal(77, 2, 512, 64)
    q = normal(78, 2, 1, 64)
    keys[:, 200:216] = q * np.float32(3)
    ask.store(keys, values)
    out = floats(auto(ask, q, 16, 2, 2), 2, 1, 64)
    wanted, _ = oracle.dense(q, keys, values)
    for h in range(2):
        a, b = out[h, 0].astype("f8"), wanted[h, 0]
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_the_selectors_differ_where_extremes_cancel_in_the_mean(ask: Asking) -> None:
    keys, values = np.zeros((1, 64, 32), "<f4"), normal(79, 1, 64, 32)
    keys[0, 0:16:2, 0], keys[0, 1:16:2, 0] = 40, -40  # mean 0, bound 40
    keys[0, 32:48, 0] = 1  # mean 1, bound 1
    ask.store(keys, values)
    q = np.zeros((1, 1, 32), "<f4")
    q[0, 0, 0] = 1
    mean, quest = auto(ask, q, 16, 1, 1, b"", -1, 0), auto(ask, q, 16, 1, 1, b"", -1, 1)
    wanted, _ = oracle.softmax_over(q[0, 0], keys[0, 32:48], values[0, 32:48])
    np.testing.assert_allclose(floats(mean, 32), wanted, rtol=0, atol=1e-5)
    wanted, _ = oracle.softmax_over(q[0, 0], keys[0, :16], values[0, :16])
    np.testing.assert_allclose(floats(quest, 32), wanted, rtol=0, atol=1e-5)


def test_storing_anew_forgets_what_was_derived(ask: Asking) -> None:
    prefix(ask, 80, 1, 96, 32)
    q = normal(81, 1, 1, 32)
    auto(ask, q, 16, 2, 1)
    keys, values = prefix(ask, 82, 1, 112, 32)
    seen = oracle.chosen_tokens(q[:, 0], keys, 16, 2)
    wanted, _ = oracle.softmax_over(q[0, 0], keys[0, seen], values[0, seen])
    np.testing.assert_allclose(floats(auto(ask, q, 16, 2, 1), 32), wanted, rtol=0, atol=1e-5)


def test_nan_stays_in_its_row(ask: Asking) -> None:
    keys, values = prefix(ask, 83, 2, 70, 32)
    q = normal(84, 2, 5, 32)
    clean = q.copy()
    q[1, 2, 7] = np.nan
    wanted, _ = oracle.dense(clean, keys, values)
    out = floats(ask.query(q)[: 4 * q.size], 2, 5, 32)
    assert np.isnan(out[1, 2]).all()
    keep = np.ones((2, 5), bool)
    keep[1, 2] = False
    np.testing.assert_allclose(out[keep], wanted[keep], rtol=0, atol=1e-5)
    more = normal(85, 2, 3, 32), normal(86, 2, 3, 32)
    fused = floats(ask.fused(q, *more), 2, 5, 32)
    assert np.isnan(fused[1, 2]).all() and not np.isnan(fused[keep]).any()
    assert ask.framed_ok(q, more, bytes([0, 1])) == fused.tobytes()
    one = q[:, 2:3].copy()
    for top in (1, 9):  # some blocks, and all of them
        sparse = floats(auto(ask, one, 16, top, 2), 2, 32)
        assert np.isnan(sparse[1]).all() and not np.isnan(sparse[0]).any()
    np.testing.assert_allclose(sparse[0], wanted[0, 2], rtol=0, atol=1e-5)
