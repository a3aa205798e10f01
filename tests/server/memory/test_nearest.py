"""The exact search against the plain one in float64, and the stores' own limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.memory import layer_store
from pion_vllm_mlx.server.memory.layer_store import LayerStore
from pion_vllm_mlx.server.memory.nearest import Floats, nearest, squared_norms


def blocks_of(keys: Floats, cuts: list[int]) -> list[tuple[Floats, Floats]]:
    parts = np.split(keys, sorted(min(cut, len(keys)) for cut in cuts))
    return [(part, squared_norms(part)) for part in parts]


def agrees(keys: Floats, query: Floats, k: int, cuts: list[int]) -> None:
    """The rows are those of a full search; of equal distances the first stored."""
    found, distances = nearest(blocks_of(keys, cuts), query, k)
    exact = np.array([np.sqrt(np.square(key - query.astype("f8")).sum()) for key in keys])
    exact[np.isnan(exact)] = np.inf
    np.testing.assert_array_equal(found, np.argsort(exact, kind="stable")[:k])
    np.testing.assert_array_equal(distances, exact[found])


@dataclass(frozen=True)
class Problem:
    """Random keys around an offset, and how they are cut into blocks."""

    seed: int
    count: int
    width: int
    k: int
    spread: float
    offset: float
    cuts: list[int]


problems = st.builds(
    Problem,
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 300),
    width=st.integers(1, 40),
    k=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1e-25, 1e-6, 1e-3, 1.0, 1e15, 1e25]),
    offset=st.sampled_from([0.0, 1.0, 1e3, 1e19]),
    cuts=st.lists(st.integers(0, 300), max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_the_nearest_rows_are_those_of_a_full_search(one: Problem) -> None:
    rng = np.random.default_rng(one.seed)
    keys = one.offset + one.spread * rng.standard_normal((one.count, one.width))
    keys = keys.astype("f4")
    keys[rng.integers(one.count)] = keys[0]
    query = keys[rng.integers(one.count)] if one.seed % 2 else keys.mean(0, dtype="f8")
    agrees(keys, query.astype("f4"), one.k, one.cuts)


def test_rows_that_are_closer_than_float32_can_tell_are_told_apart() -> None:
    """Far from zero the float32 ranking is off by far more than the distances."""
    rng = np.random.default_rng(3)
    keys = (np.float32(4000) + rng.standard_normal((5000, 64)) * 0.01).astype("f4")
    for n in range(0, 5000, 500):
        agrees(keys, keys[n], 20, [1234])


def test_rows_without_a_distance_come_last() -> None:
    keys = np.ones((6, 2), "f4")
    keys[1] = np.nan
    keys[3] = np.inf, 0
    keys[4] = 3e38, -3e38
    found, distances = nearest(blocks_of(keys, [2]), np.ones(2, "f4"), 6)
    assert found.tolist() == [0, 2, 5, 4, 1, 3]
    assert distances[:3].tolist() == [0, 0, 0] and np.isfinite(distances[3])
    assert nearest(blocks_of(keys, []), np.ones(2, "f4"), 2)[0].tolist() == [0, 2]
    assert nearest(blocks_of(keys, []), np.full(2, np.nan, "f4"), 2)[0].tolist() == [0, 1]


def test_a_session_too_many_takes_the_least_recently_used_one_away() -> None:
    layers = LayerStore(max_sessions=3)
    for sid in (b"a", b"b", b"c"):
        layers.store(sid, 0, sid * 10)
    layers.fetch(b"a", 5)
    layers.extend(b"b", 1, b"xy")
    layers.store(b"d", 0, b"d")
    assert set(layers.sessions) == {b"a", b"b", b"d"} and layers.evictions == 1
    assert layers.stored_bytes == 10 + 12 + 1
    assert layers.fetch(b"c", 0) is None


def test_short_pieces_are_joined_and_long_ones_are_not() -> None:
    layers = LayerStore()
    for n in range(50):
        layers.extend(b"s", 0, b"%02d" % n)
    held = layers.fetch(b"s", 0)
    assert held is not None and len(held) == 1
    layers.extend(b"s", 0, b"xx")
    assert len(held[0]) == 100, "what a reader holds has changed"
    long = memoryview(bytes(70_000))
    layers.extend(b"s", 0, long)
    layers.extend(b"s", 0, b"tail")
    pieces = layers.fetch(b"s", 0)
    assert pieces is not None and pieces[1] is long and [len(p) for p in pieces] == [102, 70_000, 4]
    assert len(held) == 1


def test_a_layer_that_no_reply_could_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_store, "MAX_LAYER_BYTES", 10)
    layers = LayerStore()
    layers.store(b"s", 0, b"12345678")
    with pytest.raises(CommandError, match="at most"):
        layers.extend(b"s", 0, b"901")
    assert layers.stored_bytes == 8
