"""PionPromptCache: a prefix prefilled once comes back bit for bit, by every lane."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_cache

from pion_vllm_mlx.cache import inproc, prompt_cache_store
from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.errors import ConfigError
from tests.cache.continuing import continued, unstored
from tests.cache.lane_choice import IN_PLACE, Lanes
from tests.conftest import RunningServer
from tests.models import NAMES, WINDOW, tiny_model, token_ids

IDS = token_ids(70)
LANES = ("mapped", "stored", "range", "in-process")


@pytest.fixture(autouse=True)
def nothing_in_process() -> Iterator[None]:
    inproc.PROCESS.forget()
    yield
    inproc.PROCESS.forget()


@pytest.fixture
def lanes(store: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    return Lanes(store, monkeypatch)


def expected_lane(lane: str, model: Any) -> str:
    """A model without rows has nothing to map: its states travel by command."""
    lane = lane.partition(",")[0]
    recurrent = all(type(c).__name__ == "ArraysCache" for c in mlx_cache.make_prompt_cache(model))
    return "stored" if recurrent and lane == "mapped" else lane


@pytest.mark.parametrize("name", NAMES)
def test_every_family_hits_bit_equal_by_every_lane(name: str, lanes: Lanes) -> None:
    model = tiny_model(name)
    wanted = continued(model, unstored(model, IDS))
    first = lanes(model)
    assert continued(model, first.get_or_prefill(IDS, name)) == wanted
    assert (first.misses, first.hits, first.stats()["store_failures"]) == (1, 0, 0)
    for lane in ("in-process", "mapped", IN_PLACE, "stored", "range"):
        other = lanes(model, lane)
        cache = other.get_or_prefill(IDS, name)
        stats = other.stats()
        assert (stats["last_lane"], stats["hits"]) == (expected_lane(lane, model), 1), stats
        assert not stats["lane_failures"] and stats["conversion"] is None
        assert continued(model, cache) == wanted, lane


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("lane", ["mapped", IN_PLACE, "stored"])
def test_other_dtypes_come_back_as_they_are(lanes: Lanes, lane: str, dtype: mx.Dtype) -> None:
    model = tiny_model("qwen3_5", dtype)
    wanted = continued(model, unstored(model, IDS))
    name = f"{dtype}-{lane}"
    lanes(model).get_or_prefill(IDS, name)
    other = lanes(model, lane)
    cache = other.get_or_prefill(IDS, name)
    assert (other.stats()["last_lane"], other.hits) == (expected_lane(lane, model), 1)
    assert {a.dtype for a in cache_arrays(cache[1:2])} == {dtype}
    assert continued(model, cache) == wanted


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_caches_come_back_as_they_are(
    lanes: Lanes, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_cache(self: Any) -> list[Any]:
        return [mlx_cache.QuantizedKVCache(group_size=32, bits=bits) for _ in self.layers]

    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "make_cache", make_cache, raising=False)
    wanted = continued(model, unstored(model, IDS))
    name = f"quantized{bits}"
    lanes(model).get_or_prefill(IDS, name)
    for lane in ("mapped", IN_PLACE, "stored", "range"):
        other = lanes(model, lane)
        assert continued(model, other.get_or_prefill(IDS, name)) == wanted
        assert other.stats()["last_lane"] == expected_lane(lane, model)


def test_runs_that_were_cut_are_joined(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache_store, "RUN_BYTES", 5000)
    model = tiny_model("gemma3_text")
    wanted = continued(model, unstored(model, IDS))
    lanes(model).get_or_prefill(IDS, "cut")
    for lane in ("mapped", IN_PLACE, "stored", "range"):
        other = lanes(model, lane)
        assert continued(model, other.get_or_prefill(IDS, "cut")) == wanted
        assert other.stats()["last_lane"] == expected_lane(lane, model)


_FRESH = """
import sys, json
from pion_vllm_mlx import PionPromptCache
from tests.models import tiny_model, token_ids
from tests.cache.continuing import continued
model = tiny_model("gemma3_text")
cache = PionPromptCache(model, url=sys.argv[1])
filled = cache.get_or_prefill(token_ids(70), "fresh")
logits = b"".join(continued(model, filled)).hex()
print(json.dumps([cache.stats()["last_lane"], cache.hits, logits]))
"""


def test_a_fresh_process_hits_over_the_mapped_lane(lanes: Lanes, store: RunningServer) -> None:
    model = tiny_model("gemma3_text")
    lanes(model, prefill_chunk_size=64).get_or_prefill(IDS, "fresh")
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FRESH, f"tcp://127.0.0.1:{store.port}"],
        cwd=Path(__file__).parents[2], capture_output=True, check=True, timeout=60, text=True,
    )  # fmt: skip
    lane, hits, logits = json.loads(out.stdout)
    assert (lane, hits) == ("mapped", 1)
    assert logits == b"".join(continued(model, unstored(model, IDS, 64))).hex()


def test_a_borrower_does_not_change_what_is_kept(lanes: Lanes) -> None:
    for name in ("llama", "gemma3_text", "qwen3_5"):
        model = tiny_model(name)
        wanted = continued(model, unstored(model, IDS))
        pion = lanes(model)
        first = pion.get_or_prefill(IDS, f"borrow-{name}")
        second = pion.get_or_prefill(IDS, f"borrow-{name}")
        third = pion.get_or_prefill(IDS, f"borrow-{name}")
        assert pion.stats()["lane_hits"] == {"in-process": 2}
        for entry in second:  # scribbling over a borrowed cache is the borrower's own affair
            for array in cache_arrays([entry]):
                array[...] = array * 0
        mx.eval(cache_arrays(second))
        for cache in (third, first, pion.get_or_prefill(IDS, f"borrow-{name}")):
            assert continued(model, cache) == wanted


def _one_weight(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    model.model.layers[1].self_attn.v_proj.weight = mx.where(
        mx.arange(weight.size).reshape(weight.shape) == 77, weight + 1, weight
    )


def _rope(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.rope.base = 5000.0


def _dtype(model: Any) -> None:
    model.set_dtype(mx.bfloat16)


def _quantized(model: Any) -> None:
    nn.quantize(model, group_size=32, bits=8)


@pytest.mark.parametrize(
    ("change", "field"),
    [(_one_weight, "weights"), (_rope, "structure"), (_dtype, "dtypes"), (_quantized, "dtypes")],
)
def test_another_model_under_the_same_name_is_a_miss_that_says_why(
    lanes: Lanes, change: Any, field: str
) -> None:
    name = change.__name__
    lanes(tiny_model("llama")).get_or_prefill(IDS, name)
    model = tiny_model("llama")
    change(model)
    other = lanes(model)
    cache = other.get_or_prefill(IDS, name)
    assert (other.hits, other.misses) == (0, 1)
    assert f"key field {field}" in str(other.last_miss_reason)
    assert continued(model, cache) == continued(model, unstored(model, IDS))
    again = lanes(model)
    again.get_or_prefill(IDS, name)
    assert again.hits == 1, "what was asked for last is what is stored"


def test_changing_the_model_of_an_object_is_noticed(lanes: Lanes) -> None:
    model = tiny_model("llama")
    pion = lanes(model)
    pion.get_or_prefill(IDS, "changed")
    _one_weight(model)
    cache = pion.get_or_prefill(IDS, "changed")
    assert (pion.hits, pion.misses) == (0, 2)
    assert continued(model, cache) == continued(model, unstored(model, IDS))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([*IDS[:40], (IDS[40] + 1) % 128, *IDS[41:]], "token 40 differs"),
        (IDS[:-1], "69 tokens were asked for, the stored prefix has 70"),
        ([*IDS, 5], "71 tokens were asked for"),
    ],
)
def test_other_tokens_under_the_same_name_are_a_miss_that_says_where(
    lanes: Lanes, ids: list[int], reason: str
) -> None:
    model = tiny_model("llama")
    lanes(model).get_or_prefill(IDS, reason)
    other = lanes(model)
    cache = other.get_or_prefill(ids, reason)
    assert other.hits == 0 and reason in str(other.last_miss_reason)
    assert continued(model, cache) == continued(model, unstored(model, ids))


def test_parts_of_the_key_keep_tenants_apart(lanes: Lanes) -> None:
    model = tiny_model("llama")
    lanes(model, key_parts={"tenant": "a"}).get_or_prefill(IDS, "tenants")
    other = lanes(model, "in-process", key_parts={"tenant": "b"})
    other.get_or_prefill(IDS, "tenants")
    assert other.hits == 0 and "key field tenant" in str(other.last_miss_reason)


@pytest.mark.parametrize("lane", ["mapped", "stored", "range"])
@pytest.mark.parametrize(
    ("vquant", "tolerance"), [("fp16", 6e-4), ("bf16", 5e-3), ("int8", 0.01), ("mlx4g32", 0.1)]
)
def test_a_conversion_is_asked_for_and_reported(
    lanes: Lanes, lane: str, vquant: str, tolerance: float
) -> None:
    model = tiny_model("gemma3_text")
    name = f"{vquant}-{lane}"
    first = lanes(model, vquant=vquant)
    first.get_or_prefill(IDS, name)
    assert first.stats()["conversion"] == f"float32 -> {vquant}"
    other = lanes(model, lane, vquant=vquant)
    cache = other.get_or_prefill(IDS, name)
    stats = other.stats()
    assert (stats["last_lane"], stats["conversion"]) == (lane, f"float32 -> {vquant}")
    for left, right in zip(cache, unstored(model, IDS), strict=True):
        assert left.values.dtype == mx.float32
        rows = min(left.offset, WINDOW) if type(left).__name__ == "RotatingKVCache" else 70
        a = left.values[:, :, :rows, :]
        b = right.values[:, :, right.values.shape[2] - rows :, :]
        if type(left).__name__ == "KVCache":
            b = right.values[:, :, :rows, :]
        error = float(mx.abs(a - b).max() / mx.abs(b).max())
        assert 0 < error < tolerance
    native = lanes(model, lane)
    native.get_or_prefill(IDS, name)
    assert native.hits == 0 and "key field format" in str(native.last_miss_reason)


def test_lanes_agree_on_converted_rows(lanes: Lanes) -> None:
    model = tiny_model("llama")
    for vquant in ("int8", "mlx4g32"):
        lanes(model, vquant=vquant).get_or_prefill(IDS, f"agree-{vquant}")
        seen = {}
        for lane in ("mapped", IN_PLACE, "stored", "range"):
            other = lanes(model, lane, vquant=vquant)
            seen[lane] = continued(model, other.get_or_prefill(IDS, f"agree-{vquant}"))
            assert (other.stats()["last_lane"], other.hits) == (expected_lane(lane, model), 1)
        assert seen["mapped"] == seen[IN_PLACE] == seen["stored"] == seen["range"]


def test_a_class_that_is_not_known_is_refused_by_name_and_prefilled(
    lanes: Lanes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnCache(mlx_cache.KVCache):
        pass

    model = tiny_model("llama")
    wanted = continued(model, unstored(model, IDS))
    own = lambda self: [OwnCache() for _ in self.layers]  # noqa: E731
    monkeypatch.setattr(type(model), "make_cache", own, raising=False)
    pion = lanes(model)
    with caplog.at_level(logging.WARNING, "pion_vllm_mlx"):
        for _ in range(2):
            assert continued(model, pion.get_or_prefill(IDS, "own")) == wanted
    assert "OwnCache in slot 0" in str(pion.last_miss_reason)
    assert pion.stats()["refused"] == 2 and len(caplog.records) == 1
    assert not pion.lookup("own")


def test_admission_waits_for_the_threshold(lanes: Lanes) -> None:
    model = tiny_model("llama")
    pion = lanes(model, admission_threshold=3)
    for expected in ((0, 1, 1), (0, 2, 2), (0, 3, 2), (1, 3, 2)):
        pion.get_or_prefill(IDS, "admission")
        assert (pion.hits, pion.misses, pion.admission_skips) == expected
    assert pion.stats()["hit_rate"] == 0.25
    assert lanes(model, admission_threshold=-5).admission_threshold == 1


@pytest.mark.parametrize("ids", [[], [[1, 2]], [1.5], [-1], [1 << 32], ["a"]], ids=str)
def test_bad_token_ids_are_refused(lanes: Lanes, ids: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        lanes(tiny_model("llama")).get_or_prefill(ids, "bad")


def test_bad_arguments_are_refused(lanes: Lanes) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="namespace"):
        lanes(model).get_or_prefill(IDS, "")
    with pytest.raises(ValueError, match="needs a model"):
        lanes(None).get_or_prefill(IDS, "x")
    for options in (
        {"vquant": "int3"}, {"url": "http://x"}, {"url": "tcp://h:99999"}, {"url": "unix:"},
        {"verify": "often"}, {"boundary_protect": -1},
        {"prefill_chunk_size": 0}, {"deadline_seconds": 0},
        {"deadline_seconds": float("nan")}, {"deadline_seconds": float("inf")},
        {"url": "embedded:///a%00b"}, {"key_parts": {"weights": "mine"}},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            lanes(model, **options)


def test_ids_of_any_sequence_are_the_same_prefix(lanes: Lanes) -> None:
    model = tiny_model("llama")
    lanes(model).get_or_prefill(IDS, "kinds")
    pion = lanes(model)
    for ids in (tuple(IDS), np.array(IDS, np.int64), mx.array(IDS)):
        pion.get_or_prefill(ids, "kinds")
    assert pion.hits == 3


def test_namespaces_may_hold_any_text(lanes: Lanes) -> None:
    model = tiny_model("llama")
    for name in ("a|b:c d", "schlüssel\r\n", "x" * 300):
        lanes(model).get_or_prefill(IDS, name)
        pion = lanes(model)
        pion.get_or_prefill(IDS, name)
        assert pion.hits == 1


def test_a_mapped_prefix_asked_for_again_stays_in_the_process(lanes: Lanes) -> None:
    model = tiny_model("llama")
    lanes(model).get_or_prefill(IDS, "again")
    pion = lanes(model)
    seen = []
    for _ in range(3):
        pion.get_or_prefill(IDS, "again")
        seen.append(pion.stats()["last_lane"])
    assert seen == ["mapped", "mapped", "in-process"]


def test_kept_prefixes_stay_under_their_cap(lanes: Lanes) -> None:
    model = tiny_model("llama")
    pion = lanes(model)
    pion.get_or_prefill(IDS, "cap0")
    size = inproc.PROCESS.nbytes
    assert size == 2 * 2 * 2 * 70 * 32 * 4  # layers, sides, heads, rows, width, bytes
    try:
        inproc.PROCESS.set_cap(2 * size + 100)
        for number in range(1, 4):
            pion.get_or_prefill(IDS, f"cap{number}")
        assert inproc.PROCESS.nbytes == 2 * size
        pion.get_or_prefill(IDS, "cap3")
        assert pion.stats()["last_lane"] == "in-process"
        pion.get_or_prefill(IDS, "cap0")
        assert pion.stats()["last_lane"] == "mapped"
        inproc.PROCESS.set_cap(size - 1)
        assert inproc.PROCESS.nbytes == 0
    finally:
        inproc.PROCESS.set_cap(inproc.DEFAULT_CAP_BYTES)


def test_no_inproc_keeps_nothing_in_the_process(
    lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    model = tiny_model("llama")
    pion = lanes(model)
    for _ in range(3):
        pion.get_or_prefill(IDS, "no-inproc")
    assert inproc.PROCESS.nbytes == 0 and pion.stats()["lane_hits"] == {"mapped": 2}


def test_threads_share_an_object(lanes: Lanes) -> None:
    model = tiny_model("llama")
    pion = lanes(model)
    wanted = continued(model, unstored(model, IDS))
    pion.get_or_prefill(IDS, "threads")
    inproc.PROCESS.forget()
    caches: list[Any] = []
    threads = [
        threading.Thread(target=lambda: caches.append(pion.get_or_prefill(IDS, "threads")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pion.hits == 4
    for cache in caches:
        assert continued(model, cache) == wanted
