"""boundary_protect, and every storage format, from the prompt cache to the server and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.formats import FORMATS, get_format
from tests.cache.continuing import continued, unstored
from tests.cache.lane_choice import Lanes
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids
from tests.server.wire import Wire

IDS = token_ids(70)
LAYERS = 5
QUANTIZED = ("int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")


@pytest.fixture(autouse=True)
def nothing_in_process() -> Iterator[None]:
    inproc.PROCESS.forget()
    yield
    inproc.PROCESS.forget()


@pytest.fixture
def lanes(store: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Lanes:
    return Lanes(store, monkeypatch)


def llama(**changes: Any) -> Any:
    return tiny_model("llama", **{"num_hidden_layers": LAYERS, **changes})


def rows_of(array: mx.array, count: int = len(IDS)) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``[1, H, N, D]`` as token-major rows ``[N, H*D]`` in float32."""
    cut = array[0, :, :count, :].transpose(1, 0, 2)
    return np.array(cut.reshape(count, -1).astype(mx.float32))


def kept(name: str, array: mx.array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a storage format leaves of rows that a cache of float32 holds."""
    kind = get_format(name)
    return kind.decode(kind.encode(rows_of(array)))


def pairs(cache: list[Any]) -> list[list[mx.array]]:
    arrays = cache_arrays(cache)
    return [arrays[at : at + 2] for at in range(0, len(arrays), 2)]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("lane", ["mapped", "stored", "range"])
def test_a_hit_has_what_the_format_leaves_of_every_row(lanes: Lanes, name: str, lane: str) -> None:
    model = llama(num_hidden_layers=2)
    namespace = f"{name}-{lane}"
    first = lanes(model, vquant=name)
    first.get_or_prefill(IDS, namespace)
    assert first.stats()["store_failures"] == 0
    exact = pairs(unstored(model, IDS))
    other = lanes(model, lane, vquant=name)
    found = pairs(other.get_or_prefill(IDS, namespace))
    assert (other.stats()["last_lane"], other.hits) == (lane, 1), other.stats()
    for got, wanted in zip(found, exact, strict=True):
        for side, original in zip(got, wanted, strict=True):
            assert side.dtype == mx.float32
            np.testing.assert_allclose(rows_of(side), kept(name, original), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vquant", QUANTIZED)
def test_only_the_values_between_the_protected_layers_are_quantized(
    lanes: Lanes, store: RunningServer, vquant: str
) -> None:
    model = llama()
    first = lanes(model, vquant=vquant, boundary_protect=2)
    first.get_or_prefill(IDS, vquant)
    assert first.stats()["store_failures"] == 0
    with Wire.tcp(store.port) as wire:
        keys, values = wire.info("V.INFO", f"{vquant}_pk"), wire.info("V.INFO", f"{vquant}_pv")
    assert (keys["schema"], keys["v_format"]) == ("uniform", "fp16")
    formats = [values[f"layer_{n}_fmt"] for n in range(LAYERS)]
    assert formats == ["fp16", "fp16", vquant, "fp16", "fp16"]
    assert [values[f"layer_{n}_tokens"] for n in range(LAYERS)] == [str(len(IDS))] * LAYERS
    exact = pairs(unstored(model, IDS))
    logits = set()
    for lane in ("mapped", "stored", "range"):
        other = lanes(model, lane, vquant=vquant, boundary_protect=2)
        cache = other.get_or_prefill(IDS, vquant)
        stats = other.stats()
        assert (stats["last_lane"], stats["hits"]) == (lane, 1), stats
        assert not stats["lane_failures"]
        for layer, (got, wanted) in enumerate(zip(pairs(cache), exact, strict=True)):
            formats_here = ("fp16", vquant if layer == 2 else "fp16")
            for side, original, name in zip(got, wanted, formats_here, strict=True):
                np.testing.assert_allclose(rows_of(side), kept(name, original), rtol=0, atol=1e-6)
        logits.add(b"".join(continued(model, cache)))
    if vquant != "mlx4g32":  # MLX itself dequantizes its mapped rows
        assert len(logits) == 1


def test_a_protected_prefix_of_float16_is_stored_bit_for_bit_outside_the_middle(
    lanes: Lanes,
) -> None:
    model = tiny_model("llama", mx.float16, num_hidden_layers=4)
    first = lanes(model, vquant="turbo4", boundary_protect=2)
    first.get_or_prefill(IDS, "half")
    wanted = continued(model, unstored(model, IDS))
    for lane in ("mapped", "stored"):
        other = lanes(model, lane, vquant="turbo4", boundary_protect=2)
        assert continued(model, other.get_or_prefill(IDS, "half")) == wanted
        assert (other.hits, other.stats()["conversion"]) == (1, None)
    inner = lanes(model, vquant="turbo4", boundary_protect=1)
    inner.get_or_prefill(IDS, "half-inner")
    assert inner.stats()["conversion"] == "float16 -> turbo4"


def test_windows_and_the_other_lanes_work_with_protection(lanes: Lanes) -> None:
    model = tiny_model("gemma3_text", mx.float16)
    wanted = continued(model, unstored(model, IDS))
    lanes(model, vquant="fp16", boundary_protect=1).get_or_prefill(IDS, "windows")
    for lane in ("mapped", "stored", "range", "in-process"):
        other = lanes(model, lane, vquant="fp16", boundary_protect=1)
        assert continued(model, other.get_or_prefill(IDS, "windows")) == wanted
        assert other.hits == 1, other.stats()


def test_another_protection_of_the_same_namespace_is_a_miss_with_that_reason(
    lanes: Lanes,
) -> None:
    model = llama()
    lanes(model, vquant="fp8", boundary_protect=1).get_or_prefill(IDS, "other")
    for options in ({"vquant": "fp8", "boundary_protect": 2}, {"vquant": "fp8"}, {}):
        other = lanes(model, **options)
        other.get_or_prefill(IDS, "other")
        assert (other.hits, other.misses) == (0, 1)
        assert "format" in str(other.last_miss_reason)
        assert other.stats()["store_failures"] == 0
        again = lanes(model, **options)
        again.get_or_prefill(IDS, "other")
        assert again.hits == 1


@pytest.mark.parametrize("vquant", ["fp8", "turbo4", "turbo3", "turbo2", "mlx4g32"])
def test_protection_that_cannot_be_had_is_refused_at_once(lanes: Lanes, vquant: str) -> None:
    with pytest.raises(ValueError, match="needs a model"):
        PionPromptCache(None, vquant=vquant, boundary_protect=1)
    narrow = llama(num_hidden_layers=2, head_dim=8)
    with pytest.raises(ValueError, match="multiple of 32"):
        lanes(narrow, vquant=vquant, boundary_protect=1)
    PionPromptCache(None, vquant="int8", boundary_protect=1).close()
    assert lanes(narrow, vquant=vquant).boundary_protect == 0


def test_more_layers_than_a_schema_has_are_refused_when_the_prefix_is_stored(lanes: Lanes) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    model = llama(num_hidden_layers=60, **small)
    pion = lanes(model, vquant="int8", boundary_protect=1)
    with pytest.raises(ValueError, match="up to 59 layers"):
        pion.get_or_prefill(IDS[:4], "deep")
    assert lanes(model).lookup("deep") is False


@pytest.mark.parametrize("vquant", ["raw:64", "bf16_rope_fp8_body:32", "bf16_rope_fp8_body"])
def test_formats_that_only_layers_have_are_no_vquant(lanes: Lanes, vquant: str) -> None:
    with pytest.raises(ConfigError):
        lanes(llama(), vquant=vquant)


def test_rows_beyond_the_range_of_float16_are_not_stored_as_infinities(lanes: Lanes) -> None:
    model = llama(num_hidden_layers=2)
    weight = model.layers[1].self_attn.v_proj.weight
    model.layers[1].self_attn.v_proj.weight = weight * 1e6
    for options in ({"vquant": "fp16"}, {"vquant": "int8", "boundary_protect": 1}):
        pion = lanes(model, **options)
        pion.get_or_prefill(IDS, "large")
        assert pion.stats()["store_failures"] == 1
        assert pion.lookup("large") is False
