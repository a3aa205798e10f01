"""A cache taken apart and put together again continues bit for bit."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.layers import cache_arrays, dismantle, leaves_json, rebuild, supported
from pion_vllm_mlx.errors import DamagedData, UnsupportedCache
from tests.cache.continuing import continued
from tests.cache.rows import RowBytes
from tests.models import NAMES, WINDOW, tiny_model, token_ids

DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def prefilled(model: Any, splits: list[int], cache: list[Any] | None = None) -> list[Any]:
    cache = make_prompt_cache(model) if cache is None else cache
    ids, done = token_ids(sum(splits)), 0
    for size in splits:
        model(mx.array(ids[done : done + size])[None], cache=cache)
        mx.eval(cache_arrays(cache))
        done += size
    return cache


def roundtrip(cache: list[Any], spare: int = 64) -> list[Any]:
    stored = dismantle(cache)
    slots = json.loads(json.dumps(stored.slots))
    return RowBytes(stored, spare).rebuild(slots)


def assert_same_counters(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, mlx_cache.CacheList):
        assert type(left.caches) is type(right.caches)
        for a, b in zip(left.caches, right.caches, strict=True):
            assert_same_counters(a, b)
        return
    scalars = {k: v for k, v in vars(left).items() if isinstance(v, int | type(None))}
    if isinstance(left, mlx_cache.RotatingKVCache):
        scalars.pop("_idx")  # a window in temporal order may be cut to its size
    for key, value in scalars.items():
        assert vars(right)[key] == value, key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_restored_cache_continues_bit_equal(name: str, dtype: mx.Dtype) -> None:
    model = tiny_model(name, dtype)
    lengths = [([5], 1), ([WINDOW, 1], 6), ([200, 57], 6)]
    if dtype == mx.float32:
        lengths += [([WINDOW - 1], 1), ([WINDOW], 1), ([WINDOW + 7], 1), ([200, 57], 1)]
    for splits, suffix in lengths:
        restored = roundtrip(prefilled(model, splits))
        plain = prefilled(model, splits)
        for left, right in zip(plain, restored, strict=True):
            assert_same_counters(left, right)
        assert continued(model, restored, suffix, 20) == continued(model, plain, suffix, 20), splits


@pytest.mark.parametrize("length", [1, 255, 256, 257, 512])
@pytest.mark.parametrize("spare", [0, 1, 256])
def test_lengths_around_the_buffer_step_continue_bit_equal(length: int, spare: int) -> None:
    model = tiny_model("llama")
    restored = roundtrip(prefilled(model, [length]), spare)
    assert continued(model, restored, 3, 4) == continued(model, prefilled(model, [length]), 3, 4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("length", [7, 256, 300])
def test_quantized_cache_continues_bit_equal(name: str, bits: int, length: int) -> None:
    model = tiny_model(name)
    group = 32

    def quantized() -> list[Any]:
        return [c.to_quantized(group_size=group, bits=bits) for c in prefilled(model, [length])]

    if name == "deepseek_v3":  # its attention cannot read a quantized cache: compare the arrays
        left, right = quantized(), roundtrip(quantized())
        for a, b in zip(left, right, strict=True):
            for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True):
                assert mx.array_equal(x[..., :length, :], y[..., :length, :])
        return
    assert continued(model, roundtrip(quantized()), 5, 20) == continued(model, quantized(), 5, 20)


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("splits", [[3], [10, 1, 1], [16], [40], [20, *[1] * 9], [40, *[1] * 40]])
@pytest.mark.parametrize("suffix", [1, 7])
def test_ring_with_keep_continues_bit_equal(keep: int, splits: list[int], suffix: int) -> None:
    model = tiny_model("llama")

    def rings() -> list[Any]:
        made = [mlx_cache.RotatingKVCache(max_size=WINDOW, keep=keep) for _ in range(2)]
        return prefilled(model, splits, made)

    restored = roundtrip(rings())
    assert [c.offset for c in restored] == [sum(splits)] * 2
    assert continued(model, restored, suffix, 20) == continued(model, rings(), suffix, 20)


@pytest.mark.parametrize("kind", ["ConcatenateKVCache", "ChunkedKVCache"])
@pytest.mark.parametrize("splits", [[9], [250, 20], [250, 20, 9]])
def test_other_attention_caches_continue_bit_equal(kind: str, splits: list[int]) -> None:
    model = tiny_model("llama")

    def made() -> list[Any]:
        if kind == "ConcatenateKVCache":
            return prefilled(model, splits, [mlx_cache.ConcatenateKVCache() for _ in range(2)])
        fed: list[Any] = [_Chunked(256) for _ in range(2)]
        return [c.cache for c in prefilled(model, splits, fed)]

    def used(caches: list[Any]) -> list[Any]:
        return [_Chunked(c) if kind == "ChunkedKVCache" else c for c in caches]

    restored, plain = roundtrip(made()), made()
    for left, right in zip(plain, restored, strict=True):
        assert_same_counters(left, right)
    assert continued(model, used(restored), 3, 5) == continued(model, used(plain), 3, 5)


class _Chunked:
    """Drives a ChunkedKVCache as llama4 does: trim in front before every update."""

    def __init__(self, cache: Any) -> None:
        is_size = isinstance(cache, int)
        self.cache = mlx_cache.ChunkedKVCache(cache) if is_size else cache

    @property
    def offset(self) -> int:
        return int(self.cache.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.cache.maybe_trim_front()
        k, v = self.cache.update_and_fetch(keys, values)
        return k, v

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return None


def test_states_keep_missing_entries_padding_and_lengths() -> None:
    cache = mlx_cache.ArraysCache(4, left_padding=[3])
    cache[1] = mx.random.normal((1, 3, 5)).astype(mx.bfloat16)
    cache[3] = mx.array([[True, False]])
    cache.lengths = mx.array([9])
    (back,) = roundtrip([cache])
    assert back[0] is None and back[2] is None
    assert back[1].dtype == mx.bfloat16 and mx.array_equal(back[1], cache[1])
    assert back[3].dtype == mx.bool_ and mx.array_equal(back[3], cache[3])
    assert back.left_padding.tolist() == [3] and back.lengths.tolist() == [9]
    assert back.left_padding.dtype == cache.left_padding.dtype


def test_empty_caches_stay_empty() -> None:
    made = [
        mlx_cache.KVCache(),
        mlx_cache.RotatingKVCache(8, keep=2),
        mlx_cache.QuantizedKVCache(32, 4),
        mlx_cache.ChunkedKVCache(64),
        mlx_cache.ArraysCache(2),
        mlx_cache.CacheList(mlx_cache.KVCache(), mlx_cache.CacheList(mlx_cache.ArraysCache(1))),
    ]
    stored = dismantle(made)
    assert stored.leaves == [] and stored.rows == [] and stored.states == {}
    for left, right in zip(made, roundtrip(made), strict=True):
        assert_same_counters(left, right)
        assert right.empty()


def test_a_trimmed_cache_keeps_its_length_and_not_the_rows_past_it() -> None:
    model = tiny_model("llama")
    cache = prefilled(model, [40])
    for entry in cache:
        entry.trim(13)
    again = prefilled(model, [40])
    for entry in again:
        entry.trim(13)
    stored = dismantle(cache)
    assert {run.start + run.count for run in stored.rows} == {27}
    assert continued(model, roundtrip(cache), 4, 20) == continued(model, again, 4, 20)
    for entry in cache:
        entry.trim(1000)
    assert [c.offset for c in roundtrip(cache)] == [0, 0]


def test_sides_of_other_width_and_zero_width_have_their_own_leaves() -> None:
    cache = mlx_cache.KVCache()
    cache.update_and_fetch(mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 0)))
    wide = mlx_cache.KVCache()
    wide.update_and_fetch(mx.ones((1, 1, 5, 64)), mx.ones((1, 1, 5, 32)).astype(mx.float16))
    stored = dismantle([cache, wide])
    assert json.loads(leaves_json(stored.leaves)) == [
        {"k": 16, "v": 0, "heads": 2, "format": "fp32"},
        {"k": 64, "v": 0, "heads": 1, "format": "fp32"},
        {"k": 0, "v": 32, "heads": 1, "format": "fp16"},
    ]
    first, second = roundtrip([cache, wide])
    assert first.values.shape[-1] == 0 and first.values.dtype == mx.float32
    assert second.values.dtype == mx.float16 and mx.array_equal(
        second.values[:, :, :5], wide.values[:, :, :5]
    )


@pytest.mark.parametrize("spare", [0, 64, 256])
def test_a_side_without_width_is_as_long_as_the_other(spare: int) -> None:
    for rows in (5, 256):
        cache = mlx_cache.KVCache()
        cache.update_and_fetch(mx.ones((1, 2, rows, 8)), mx.ones((1, 2, rows, 0)))
        (back,) = roundtrip([cache], spare)
        assert back.keys.shape[2] == back.values.shape[2] == rows + spare
        k, v = back.update_and_fetch(mx.ones((1, 2, 9, 8)), mx.ones((1, 2, 9, 0)))
        assert k.shape == (1, 2, rows + 9, 8) and v.shape == (1, 2, rows + 9, 0)
        dismantle([back])


class _Subclass(mlx_cache.KVCache):
    pass


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: [mlx_cache.KVCache(), _Subclass()], r"_Subclass in slot 1"),
        (lambda: [mlx_cache.BatchKVCache([0])], r"BatchKVCache in slot 0"),
        (
            lambda: [mlx_cache.CacheList(mlx_cache.KVCache(), mlx_cache.CacheList(object()))],
            r"object in slot 0\.1\.0",
        ),
        (lambda: ["text"], "str in slot 0"),
    ],
)
def test_unknown_classes_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(UnsupportedCache, match=named):
        dismantle(make())


def test_other_batch_sizes_are_refused_by_name() -> None:
    plain, states = mlx_cache.KVCache(), mlx_cache.ArraysCache(1)
    plain.update_and_fetch(mx.ones((2, 2, 5, 8)), mx.ones((2, 2, 5, 8)))
    states[0] = mx.ones((3, 4))
    with pytest.raises(UnsupportedCache, match="KVCache in slot 0 has batch size 2"):
        dismantle([plain])
    with pytest.raises(UnsupportedCache, match="ArraysCache in slot 1 has batch size 3"):
        dismantle([mlx_cache.KVCache(), states])


def test_geometry_names_classes_and_window() -> None:
    assert supported(tiny_model("gemma3_text"))[0] == {
        "class": "RotatingKVCache",
        "max_size": WINDOW,
        "keep": 0,
    }
    kinds = supported(tiny_model("falcon_h1"))[0]["caches"]
    assert [kind["class"] for kind in kinds] == ["ArraysCache", "KVCache"]


def test_wrong_rows_and_damaged_metadata_are_refused() -> None:
    stored = dismantle(prefilled(tiny_model("llama"), [10]))
    with pytest.raises(DamagedData, match="where"):
        rebuild(stored.slots, lambda *_: mx.zeros((2, 9, 32)), {})
    with pytest.raises(DamagedData, match="where"):
        rebuild(stored.slots, lambda *_: mx.zeros((2, 10, 32), mx.float16), {})
    with pytest.raises(DamagedData, match="metadata"):
        rebuild([{"class": "KVCache"}], lambda *_: mx.zeros((2, 9, 32)), {})
    with pytest.raises(DamagedData, match="metadata"):
        rebuild([{"class": "Other"}], lambda *_: mx.zeros((2, 9, 32)), {})


def test_slices_are_taken_without_copying_the_live_buffer() -> None:
    model = tiny_model("llama")
    cache = prefilled(model, [300])
    before = mx.get_active_memory()
    stored = dismantle(cache)
    mx.eval([run.array for run in stored.rows])
    assert mx.get_active_memory() == before
