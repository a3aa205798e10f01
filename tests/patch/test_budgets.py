"""A server that holds fewer layers than are attended: slower, never wrong, and with an end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pion_vllm_mlx
from pion_vllm_mlx.cache.attend_client import AttendClient
from pion_vllm_mlx.errors import ColdMiss, OutOfMemory, StoreUnavailable
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids
from tests.patch.conftest import Opener, alone, forwards, furthest
from tests.server.attention.asking import connected, flagged

IDS = token_ids(40)
LAYERS = 4
LAYER_BYTES = 2 * 4 * 2 * 40 * 32  # K and V, float32, of 2 heads

pytestmark = pytest.mark.usefixtures("patched")


@contextmanager
def small(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layers: float
) -> Iterator[tuple[RunningServer, Opener]]:
    """A server whose attention cache holds so many layers of the prefix."""
    with flagged(folder / "data", "--attend-budget", str(int(layers * LAYER_BYTES))) as server:
        opener = Opener(server.port, monkeypatch)
        try:
            yield server, opener
        finally:
            opener.close()


def counters(server: RunningServer) -> dict[str, int]:
    with connected(server) as asking:
        return asking.info()


def stored(opened: Opener, model: Any, lane: str, name: str = "small") -> tuple[Any, list[Any]]:
    pc = opened(model, lane)
    pc.get_or_prefill(IDS, name)
    return pc, pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_with_a_budget_of_half_a_model_a_forward_is_right_and_every_step_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    model, steps = tiny_model("llama", num_hidden_layers=LAYERS), 3
    with small(tmp_path, monkeypatch, LAYERS / 2) as (server, opened):
        pc, cache = stored(opened, model, lane)
        assert furthest(forwards(model, cache, steps), alone(model, IDS, steps)) < 1e-5
        found = counters(server)
        # the first forward finds nothing, each step all layers cold: the oldest are asked first
        assert pc.cold_rehydrates_observed == steps * LAYERS
        assert found["sdpa_rehydrates"] == steps * LAYERS
        assert found["sdpa_demotions"] == (steps + 1) * LAYERS - LAYERS // 2
        assert (found["sdpa_warm"], found["sdpa_cold"]) == (LAYERS // 2, LAYERS // 2)
        assert found["sdpa_queries"] == pc.attend_query_calls == (steps + 1) * LAYERS


def test_one_cold_layer_is_warmed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    with small(tmp_path, monkeypatch, LAYERS + 1) as (server, opened):
        pc, cache = stored(opened, model, "binary")
        forwards(model, cache, 0)
        row = np.zeros((2, len(IDS), 32), np.float32)
        for layer in range(2):
            pc.attend_store_layer("filler", layer, row, row)
        before = counters(server)
        assert before["sdpa_cold"] == 1
        pc.attend_query("filler", 0, row[:, 0])
        with connected(server, cache[0].group.remote.sid) as asking:
            assert [asking.at(layer=n).lookup() for n in range(3)] == ["COLD", "HIT", "HIT"]
            words = ("KV.PREFIX.WARM", "small", 2, 32, asking.sid, "LAYER", 0)
            assert asking.wire.ask(*words) == "1"
            # the least recently queried one gave its place: layer 1
            assert [asking.at(layer=n).lookup() for n in range(3)] == ["HIT", "COLD", "HIT"]
        after = counters(server)
        assert after["sdpa_rehydrates"] == before["sdpa_rehydrates"] + 1
        assert after["sdpa_demotions"] == before["sdpa_demotions"] + 1


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_a_budget_below_one_layer_is_an_error_that_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    model = tiny_model("llama")
    with small(tmp_path, monkeypatch, 0.5) as (server, opened):
        pc, cache = stored(opened, model, lane)
        with pytest.raises(OutOfMemory, match="--attend-budget"):
            forwards(model, cache, 0)
        assert counters(server)["sdpa_warm"] == 0
        with pytest.raises(StoreUnavailable, match="new cache"):
            forwards(model, cache, 0)


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_a_layer_that_others_push_out_at_once_is_asked_twice_and_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    model = tiny_model("llama")
    with small(tmp_path, monkeypatch, 1) as (_, opened):
        pc, cache = stored(opened, model, lane)
        forwards(model, cache, 0)
        warm, warmed = AttendClient.warm, []
        row = np.zeros((2, len(IDS), 32), np.float32)

        def and_pushed_out(client: AttendClient, *what: Any) -> int:
            done = warm(client, *what)
            warmed.append(done)
            pc.attend_store_layer("other", 0, row, row)
            return done

        monkeypatch.setattr(AttendClient, "warm", and_pushed_out)
        with pytest.raises(ColdMiss, match="layer 0 .*--attend-budget"):
            forwards(model, cache, 0)
        assert warmed == [1]
        assert pc.cold_rehydrates_observed == 2
