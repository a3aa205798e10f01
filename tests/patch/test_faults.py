"""What goes wrong between client and server never becomes a wrong number."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from crc32c import crc32c

import pion_vllm_mlx
from pion_vllm_mlx import StoreUnavailable
from pion_vllm_mlx.cache.attend_client import AttendClient
from pion_vllm_mlx.cache.completion import Run
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.errors import CommandError
from tests.conftest import RunningServer, running_server
from tests.models import tiny_model, token_ids
from tests.patch.conftest import LANES, Opener, alone, forwards, furthest

IDS = token_ids(40)
OTHER = token_ids(40, seed=11)
SLOTS = 256  # of a worker

pytestmark = pytest.mark.usefixtures("patched")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, Opener]]:
    """A server of this test's own, to kill, and prompt caches for it."""
    with running_server(tmp_path / "data") as server:
        opener = Opener(server.port, monkeypatch)
        yield server, opener
        opener.close()


def stored(pc: PionPromptCache, model: Any, name: str, ids: list[int] = IDS) -> list[Any]:
    pc.get_or_prefill(ids, name)
    return pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(ids))


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_a_server_killed_between_layers_is_a_clear_error_and_the_cache_stays_unusable(
    own: tuple[RunningServer, Opener], lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, opened = own
    model = tiny_model("llama")
    pc = opened(model, lane)
    cache = stored(pc, model, "killed")
    wanted = alone(model, IDS, 3)
    assert furthest(forwards(model, cache, 0), wanted[:1]) < 1e-5
    ask = AttendClient.fused

    def fused(client: AttendClient, slot: Any, query: Any) -> Any:
        if slot.layer == 1:
            server.kill()
        return ask(client, slot, query)

    monkeypatch.setattr(AttendClient, "fused", fused)
    with pytest.raises(StoreUnavailable):
        model(mx.array([[1]]), cache=cache)
    monkeypatch.undo()
    server.start()
    with pytest.raises(StoreUnavailable, match=r"new cache.*layer 1 of namespace killed"):
        model(mx.array([[1]]), cache=cache)


def test_after_a_restart_a_new_cache_attends_to_the_rows_that_are_on_disk(
    own: tuple[RunningServer, Opener]
) -> None:
    server, opened = own
    model = tiny_model("gemma3_text")
    stored(opened(model), model, "restarted")
    server.restart()
    pc = opened(model)
    cache = pion_vllm_mlx.make_pion_prompt_cache(model, "restarted", pc, len(IDS))
    assert furthest(forwards(model, cache, 3), alone(model, IDS, 3)) < 1e-5


def test_a_server_that_hangs_is_given_up_within_a_deadline(
    own: tuple[RunningServer, Opener], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, opened = own
    model = tiny_model("llama")
    pc = opened(model)
    cache = stored(pc, model, "hangs")
    forwards(model, cache, 0)
    monkeypatch.setattr("pion_vllm_mlx.cache.attend_lane._WORK_SECONDS", 0.3)
    monkeypatch.setattr("pion_vllm_mlx.cache.attend_client.WORK_SECONDS", 0.3)
    monkeypatch.setattr(pc._client, "deadline_seconds", 0.3)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            model(mx.array([[1]]), cache=cache)
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_a_server_that_stands_still_is_asked_once_and_one_that_computes_is_waited_for(
    own: tuple[RunningServer, Opener], monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    server, opened = own
    model = tiny_model("llama")
    pc = opened(model, lane)
    cache, asked = stored(pc, model, "still"), []
    pc.attention.silence_seconds = 1e-4  # every query takes longer
    answers, floats = AttendClient._answers, AttendClient._floats

    def counted(client: AttendClient, address: Any) -> None:
        asked.append("ping")
        answers(client, address)

    monkeypatch.setattr(AttendClient, "_answers", counted)
    assert furthest(forwards(model, cache, 3), alone(model, IDS, 3)) < 1e-5
    assert asked

    def resp(client: AttendClient, *what: Any) -> Any:
        asked.append("resp")
        return floats(client, *what)

    monkeypatch.setattr(AttendClient, "_floats", resp)
    asked.clear()
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            model(mx.array([[1]]), cache=cache)
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert asked == (["ping"] if lane == "binary" else ["resp", "ping"])


@pytest.mark.parametrize("lane", ["binary", "resp"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_slots_that_became_cold_are_warmed_again_and_the_numbers_stay(
    own: tuple[RunningServer, Opener], lane: str, family: str
) -> None:
    opened = own[1]
    model = tiny_model(family)  # of grouped queries: WARM must be told the stored heads
    pc = opened(model, lane)
    cache = stored(pc, model, "cold")
    forwards(model, cache, 0)
    row = np.zeros((1, 1, 32), np.float32)
    for layer in range(SLOTS):
        pc.attend_store_layer("filler", layer, row, row)
    found = [model(mx.array([[token]]), cache=cache) for token in token_ids(3, seed=9)]
    assert furthest(found, alone(model, IDS, 3)[1:]) < 1e-5
    assert pc.cold_rehydrates_observed >= 1


@pytest.mark.parametrize("lane", ["binary", "resp"])
def test_another_prefix_under_the_same_name_is_never_attended_instead(
    own: tuple[RunningServer, Opener], lane: str
) -> None:
    opened = own[1]
    model = tiny_model("llama")
    cache = stored(opened(model, lane), model, "reused")
    forwards(model, cache, 0)
    other = stored(opened(model, lane), model, "reused", OTHER)
    assert furthest(forwards(model, other, 3), alone(model, OTHER, 3)) < 1e-5
    with pytest.raises(StoreUnavailable, match="replaced"):
        model(mx.array([[1]]), cache=cache)


def test_rows_that_are_replaced_while_they_are_warmed_do_not_stay(
    own: tuple[RunningServer, Opener], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = own[1]
    model = tiny_model("llama")
    pc, second = opened(model), opened(model)
    cache = stored(pc, model, "raced")
    warm = AttendClient.warm

    def late(client: AttendClient, *what: Any) -> int:
        second.get_or_prefill(OTHER, "raced")
        return warm(client, *what)

    monkeypatch.setattr(AttendClient, "warm", late)
    with pytest.raises(StoreUnavailable, match="replaced"):
        forwards(model, cache, 0)
    monkeypatch.undo()
    assert second.lookup("raced")  # a reader takes nothing away from a writer
    forwards(model, pion_vllm_mlx.make_pion_prompt_cache(model, "raced", second, len(OTHER)), 0)
    again = stored(pc, model, "raced")
    assert furthest(forwards(model, again, 2), alone(model, IDS, 2)) < 1e-5


def test_a_prefix_being_stored_again_is_never_warmed_half(
    own: tuple[RunningServer, Opener], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = own[1]
    model = tiny_model("llama")
    pc, second = opened(model), opened(model)
    cache = stored(pc, model, "again")
    warm, store_rows = AttendClient.warm, StoreClient.store_rows
    refused = []

    def halfway(client: AttendClient, *what: Any) -> int:
        def store(to: StoreClient, namespace: str, blobs: Any) -> int:
            runs = list(blobs)
            store_rows(to, namespace, [_first_half(*one) for one in runs])
            try:
                warm(client, *what)
            except CommandError as error:
                refused.append(error)
            return store_rows(to, namespace, runs)

        monkeypatch.undo()
        monkeypatch.setattr(StoreClient, "store_rows", store)
        second._client.drop("again")
        second.get_or_prefill(IDS, "again")
        monkeypatch.undo()
        return warm(client, *what)

    monkeypatch.setattr(AttendClient, "warm", halfway)
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    wanted = alone(model, IDS, 2)
    assert furthest(forwards(model, cache, 2), wanted) < 1e-5
    assert refused
    late = pion_vllm_mlx.make_pion_prompt_cache(model, "again", opened(model), len(IDS))
    assert furthest(forwards(model, late, 2), wanted) < 1e-5


def _first_half(run: Run, blob: Any) -> tuple[Run, bytes]:
    """The first rows of each head of a run that is stored head by head."""
    heads, rows = 2, run.rows // 2
    cut = np.frombuffer(memoryview(blob), np.uint8).reshape(heads, run.rows, -1)[:, :rows]
    return replace(run, rows=rows, crc=crc32c(cut.tobytes())), cut.tobytes()


@pytest.mark.parametrize("lane", LANES)
def test_a_wrong_length_is_refused(own: tuple[RunningServer, Opener], lane: str) -> None:
    model = tiny_model("llama")
    pc = own[1](model, lane)
    stored(pc, model, "length")
    with pytest.raises(ValueError, match="holds 40 tokens, 39 were asked for"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "length", pc, 39)


def test_another_model_and_other_tokens_are_refused(own: tuple[RunningServer, Opener]) -> None:
    opened = own[1]
    model, wider = tiny_model("llama"), tiny_model("llama", intermediate_size=96)
    pc = opened(model)
    stored(pc, model, "whose")
    with pytest.raises(ValueError, match="key field .* differs"):
        pion_vllm_mlx.make_pion_prompt_cache(wider, "whose", opened(wider), len(IDS))
    with pytest.raises(ValueError, match="another model"):
        pion_vllm_mlx.make_pion_prompt_cache(wider, "whose", pc, len(IDS))
    late = opened(model)
    late.get_or_prefill(OTHER, "whose")
    with pytest.raises(ValueError, match="token 0 differs"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "whose", pc, len(IDS))


def test_nothing_stored_and_no_server_are_said_at_once(own: tuple[RunningServer, Opener]) -> None:
    server, opened = own
    model = tiny_model("llama")
    pc = opened(model)
    with pytest.raises(ValueError, match="nothing to attend to is stored"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "absent", pc, 4)
    server.stop()
    with pytest.raises(StoreUnavailable):
        pion_vllm_mlx.make_pion_prompt_cache(model, "absent", pc, 4)


def test_a_foreign_prefix_is_attended_by_who_says_so_unless_strict(
    own: tuple[RunningServer, Opener]
) -> None:
    opened = own[1]
    model = tiny_model("llama")
    pc = opened(model)
    cache = pc.get_or_prefill(IDS, "kept")
    for layer, entry in enumerate(cache):
        rows = (np.array(a[0, :, : len(IDS)]) for a in (entry.keys, entry.values))
        pc.attend_store_layer("foreign", layer, *rows)
    make = pion_vllm_mlx.make_pion_prompt_cache
    made = make(model, "foreign", pc, len(IDS), foreign=True)
    assert furthest(forwards(model, made, 3), alone(model, IDS, 3)) < 1e-5
    with pytest.raises(ValueError, match="strict"):
        make(model, "foreign", opened(model, strict=True), len(IDS), foreign=True)


def test_a_mask_that_hides_a_part_of_the_prefix_is_refused(
    own: tuple[RunningServer, Opener]
) -> None:
    model = tiny_model("llama")
    cache = stored(own[1](model), model, "masked")
    place = vars(__import__("mlx_lm.models.base", fromlist=["base"]))
    q, k = mx.random.normal((1, 4, 3, 32)), mx.random.normal((1, 2, 3, 32))
    mask = cache[0].make_mask(3, return_array=True)
    mask[0, 5] = False
    keys, values = cache[0].update_and_fetch(k, k)
    with pytest.raises(NotImplementedError, match="hides a part"):
        place["scaled_dot_product_attention"](q, keys, values, cache[0], 1.0, mask)


def test_a_full_mask_is_what_causal_is(own: tuple[RunningServer, Opener]) -> None:
    model = tiny_model("llama")
    pc = own[1](model)
    pc.get_or_prefill(IDS, "full mask")
    place = vars(__import__("mlx_lm.models.base", fromlist=["base"]))
    q, k = mx.random.normal((1, 4, 3, 32)), mx.random.normal((1, 2, 3, 32))
    found = []
    for array in (False, True):
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, "full mask", pc, len(IDS))
        mask = cache[0].make_mask(3, return_array=array)
        keys, values = cache[0].update_and_fetch(k, k)
        found.append(
            place["scaled_dot_product_attention"](q, keys, values, cache[0], 0.3, mask)
        )
    assert float(mx.abs(found[0] - found[1]).max()) < 1e-5
