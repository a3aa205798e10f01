"""Requests of another kind: draft models, quantized KV, adapters, no store; and the protocol."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import inspect
import json
import logging
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server
from tests.serve.engine_child import KEY
from tests.serve.engines import Engine, running_engine

pytest.importorskip("mlx_lm")

TEXT = "Some quick brown fox jumps over some lazy dog and naps. " * 9
NO_END = {"logit_bias": {"0": -100.0}}  # a random model would end its reply somewhere
AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
HISTORY = {"repetition_penalty": 1.3, "repetition_context_size": 40}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def store(server: RunningServer) -> tuple[str, ...]:
    """The flags that name the server of the module."""
    return ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve.tiny_folder import make_folder

    folder = tmp_path_factory.mktemp("models")
    make_folder(folder / "llama")
    make_folder(folder / "draft", hidden_size=32)
    make_folder(folder / "mamba", "mamba")
    return folder


@pytest.fixture(scope="module")
def engine(
    tmp_path_factory: pytest.TempPathFactory, models: Path, store: tuple[str, ...]
) -> Iterator[Engine]:
    """One engine on a plain model."""
    folder = tmp_path_factory.mktemp("engine")
    with running_engine(folder, models / "llama", *store) as running:
        yield running


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a LoRA adapter of random weights to ``folder``; it replaces what is there."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    settings = {"rank": 4, "scale": 8.0, "dropout": 0.0}
    loaded = load(str(model))[0]
    linear_to_lora_layers(loaded, 2, settings)
    mx.random.seed(seed)
    weights = {
        name: mx.random.normal(value.shape)
        for name, value in tree_flatten(loaded.parameters())
        if "lora_" in name
    }
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    told = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def test_an_adapter_reloaded_under_its_name_is_another_key(
    engine: Engine, models: Path, tmp_path: Path
) -> None:
    plain = engine.complete(TEXT)
    folder = adapter(tmp_path / "adapter", models / "llama", seed=1)
    first = engine.complete(TEXT, adapters=str(folder), model=str(engine.model))
    assert first.cached == 0
    assert first.tokens != plain.tokens
    engine.until_stored()
    back = engine.complete(TEXT)
    assert (back.tokens, back.cached) == (plain.tokens, plain.prompt - 1)
    adapter(folder, models / "llama", seed=2)
    second = engine.complete(TEXT, adapters=str(folder), model=str(engine.model))
    assert second.cached == 0
    assert second.tokens != first.tokens
    engine.until_stored()
    assert engine.complete(TEXT).tokens == plain.tokens
    adapter(folder, models / "llama", seed=1)
    third = engine.complete(TEXT, adapters=str(folder), model=str(engine.model))
    assert (third.tokens, third.cached) == (first.tokens, first.prompt - 1)
    assert engine.complete(TEXT).tokens == plain.tokens


def test_penalties_see_the_whole_prompt_whatever_is_reused(engine: Engine) -> None:
    text = "Penalties. " + TEXT
    first = engine.complete(text, seed=1, **HISTORY)
    assert engine.complete(text, seed=1, **HISTORY).tokens == first.tokens
    batched = engine.complete(text, **HISTORY)
    assert batched.cached == batched.prompt - 1
    assert batched.tokens == first.tokens


def test_a_draft_model_s_caches_are_kept_with_the_model_s(
    tmp_path: Path, models: Path, store: tuple[str, ...], engine: Engine
) -> None:
    flags = ("--draft-model", str(models / "draft"), "--num-draft-tokens", "2")
    with running_engine(tmp_path, models / "llama", *store, flags=flags) as drafting:
        text = "Drafts. " + TEXT
        plain = engine.complete(text, 24)
        first = drafting.complete(text, 24)
        assert (first.tokens, first.cached) == (plain.tokens, 0)
        again = drafting.complete(text, 24)
        assert (again.tokens, again.cached) == (plain.tokens, again.prompt - 1)
        # Both models are counted: what one of them skips, the other skips too.
        assert first.forward - again.forward == 2 * again.cached
        longer = drafting.complete(text + "And on.", 24)
        assert longer.tokens == engine.complete(text + "And on.", 24).tokens
        assert longer.cached >= first.prompt - 1
        drafting.until_stored()
        drafting.restart()
        found = drafting.complete(text, 24)
        assert (found.tokens, found.cached) == (plain.tokens, again.cached)
        assert found.receipt["tier"] in ("memory", "mapped", "stored")


def test_quantized_caches_are_kept_as_they_are(
    tmp_path: Path, models: Path, store: tuple[str, ...]
) -> None:
    source = inspect.getsource(importlib.import_module("mlx_lm.server"))
    if "--kv-bits" not in source:
        pytest.skip("this mlx-lm's server quantizes no caches")
    flags = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    with running_engine(tmp_path, models / "llama", *store, flags=flags) as quantized:
        first = quantized.complete(TEXT)
        assert first.cached == 0  # not what the plain cache of the same model holds
        again = quantized.complete(TEXT)
        assert (again.tokens, again.cached) == (first.tokens, again.prompt - 1)
        quantized.until_stored()
        quantized.restart()
        found = quantized.complete(TEXT)
        assert (found.tokens, found.cached) == (first.tokens, again.cached)
        edited = quantized.complete(TEXT[:200] + "#" + TEXT[201:])
        assert edited.cached == 200


def test_caches_that_are_quantized_later_on_neither_give_nor_take_rows_of_a_plain_model(
    tmp_path: Path, models: Path, store: tuple[str, ...], engine: Engine
) -> None:
    if "--kv-bits" not in inspect.getsource(importlib.import_module("mlx_lm.server")):
        pytest.skip("this mlx-lm's server quantizes no caches")
    text = "Later on. " + TEXT
    flags = ("--kv-bits", "4", "--kv-group-size", "32", "--prefill-step-size", "64")
    late = ("--quantized-kv-start", "64")
    with running_engine(tmp_path, models / "llama", "--no-pion", flags=flags + late) as plain:
        wanted = plain.complete(text)
    engine.complete(text)
    engine.until_stored()
    listed = engine.stats()["written"]
    for more in (late, ()):  # mlx-lm's own default lies beyond any of these prompts
        with running_engine(tmp_path, models / "llama", *store, flags=flags + more) as quantized:
            first = quantized.complete(text)
            assert first.cached == 0
            assert first.tokens == wanted.tokens or not more
            told = quantized.output()
            assert told.count("--quantized-kv-start 0 has them stored") == 1
            sentence = quantized.request("/v1/pion/explain", {})[1]["sentence"]
            assert "--quantized-kv-start 0" in sentence
            assert quantized.stats()["bypass"] and not quantized.stats().get("written")
    assert engine.stats()["written"] == listed


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_without_a_store_it_is_mlx_lm_s_server_that_outlives_exact_repeats(
    tmp_path: Path, models: Path, family: str
) -> None:
    with running_engine(tmp_path, models / family, "--no-pion") as plain:
        first = plain.complete(TEXT)
        for _ in range(2):
            again = plain.complete(TEXT)
            assert again.tokens == first.tokens
            assert again.forward == again.prompt - again.cached + again.usage["completion_tokens"]
        assert again.receipt == {}
        assert plain.stats() == {"pion": "disabled"}
        assert plain.request("/v1/pion/explain", {})[1]["sentence"] == "there is no store"


def test_only_the_front_is_answered(engine: Engine) -> None:
    for path, body in (("/health", None), ("/v1/completions", {"prompt": "x"})):
        assert engine.request(path, body, key="another")[0] == 401
    assert engine.request("/v1/models")[1]["data"][0]["id"] == str(engine.model)


def test_count_tokens_counts_those_of_the_same_chat(engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    counted = engine.request("/v1/pion/count_tokens", {"messages": messages})
    assert counted == (200, {"input_tokens": engine.chat(messages).prompt})
    for wrong in ([], {"messages": 3}, {}):
        assert engine.request("/v1/pion/count_tokens", wrong)[0] == 400
    assert engine.request("/health")[0] == 200


def test_explain_names_the_first_token_that_differs(engine: Engine) -> None:
    def chat(clock: str) -> list[dict[str, Any]]:
        system = {"role": "system", "content": f"It is {clock} now. " + "Be kind. " * 20}
        return [system, {"role": "user", "content": "Hello."}]

    engine.chat(chat("12:00"))
    engine.until_stored()
    status, told = engine.request("/v1/pion/explain", {"messages": chat("12:07")})
    assert status == 200
    assert (told["asked_text"]["token"], told["stored_text"]["token"]) == ("7", "0")
    assert told["asked_text"]["before"].endswith("It is 12:0")
    assert told["common"] == told["position"]
    engine.chat(chat("12:09"))
    engine.until_stored()
    last = engine.request("/v1/pion/explain", {})[1]
    assert last["prompt_tokens"] == told["prompt_tokens"]


def test_streams_carry_usage_and_the_receipt(engine: Engine) -> None:
    body = {"prompt": "Streams. " + TEXT, "max_tokens": 4, "stream": True}
    asked = {**body, "stream_options": {"include_usage": True}}
    engine.complete("Streams. " + TEXT, 4)
    with engine.open("/v1/completions", asked) as answer:
        chunks = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    receipts = [chunk["pion"] for chunk in chunks if "pion" in chunk]
    usage = chunks[-1]["usage"]
    assert receipts[-1]["reused_tokens"] == usage["prompt_tokens"] - 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == receipts[-1]["reused_tokens"]
    assert receipts[-1]["tier"] == "memory"


def test_a_prompt_that_the_template_refuses_leaves_the_engine_alive(engine: Engine) -> None:
    twice = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    status, told = engine.request("/v1/chat/completions", {"messages": twice, "max_tokens": 1})
    assert status >= 400
    assert "the system message must be first" in str(told["error"])
    assert engine.complete("Still there?").prompt


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": ""}, "no tokens"),
        ("/v1/completions", {"prompt": "", "seed": 1}, "no tokens"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1.0}}, "logit_bias"),
        # of the model, whose tokenizer has none like it
        ("/v1/completions", {"prompt": "x", "logit_bias": {"263": 1.0}}, "the last one is 262"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"-1": 1.0}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "temperature": 10**400}, "temperature"),
        ("/v1/completions", {"prompt": "x", "presence_penalty": -(10**400)}, "presence_penalty"),
        (
            "/v1/completions",
            {"prompt": "x", "temperature": 1, "xtc_probability": 0.9, "xtc_threshold": 0.9},
            "xtc_threshold",
        ),
    ],
)
def test_what_a_step_of_all_requests_would_fail_on_costs_its_own_request_alone(
    engine: Engine, path: str, body: Any, named: str
) -> None:
    pid = engine.running.process.pid
    long = {"prompt": "Others. " + TEXT, "max_tokens": 400, "stream": True}
    with engine.open("/v1/completions", {**long, "logit_bias": {"0": -100.0}}) as answer:
        answer.readline()
        status, told = engine.request(path, {"max_tokens": 2, **body})
        rest = answer.read()
    assert (status in (400, 404), named in str(told["error"])) == (True, True)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert engine.complete("Still there?").prompt
    assert engine.running.process.pid == pid


def test_more_choices_than_there_are_tokens_are_all_of_them(engine: Engine) -> None:
    body = {"temperature": 1.0, "top_k": 1 << 40, "repetition_context_size": 1 << 70}
    assert engine.complete("Choices. " + TEXT, **body, repetition_penalty=1.1).prompt


@pytest.mark.parametrize(
    ("error", "told"),
    [(BrokenPipeError(), False), (ConnectionResetError(), False), (KeyError(), True)],
)
def test_only_an_error_that_is_no_client_s_leaving_has_a_traceback(
    error: Exception, told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    from pion_vllm_mlx.serve.engine_mlx_lm_http import Listening

    class Failing(BaseHTTPRequestHandler):
        def handle(self) -> None:
            raise error

    with Listening(("127.0.0.1", 0), Failing) as listening:
        server: Any = listening
        client = socket.create_connection(listening.server_address)
        server.process_request_thread(*listening.get_request())
        client.close()
    assert ("Traceback" in capfd.readouterr().err) == told


def test_tools_that_a_model_does_not_know_are_told_of_once(engine: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for said in ("one", "two", "three"):
        engine.chat([{"role": "user", "content": said}], 1, tools=tools)
    assert engine.output().count("Received tools but model does not support") <= 1


def test_a_cache_class_that_is_not_known_is_served_by_mlx_lm_s_own_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from mlx_lm.models.cache import KVCache

    from pion_vllm_mlx.cache.lineage import LineageOptions
    from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache
    from tests.models import tiny_model

    class NewCache(KVCache):  # type: ignore[misc]
        pass

    model = tiny_model("llama")
    model.make_cache = lambda: [NewCache() for _ in model.layers]
    cache = LineageCache(LineageOptions(url="tcp://127.0.0.1:1"), CacheLimits())
    with caplog.at_level(logging.WARNING):
        cache.attach(model, None)
        cache.attach(model, None)
    assert len([line for line in caplog.messages if "NewCache" in line]) == 1
    assert cache.store is None
    caches = model.make_cache()
    model(_row([1, 2, 3]), cache=caches)
    cache.insert_cache("m", [1, 2, 3], caches)
    found, rest = cache.fetch_nearest_cache("m", [1, 2, 3])
    assert found is not None
    assert (found[0].offset, rest) == (2, [3])
    cache.close()


def test_images_stay_in_mlx_lm_s_own_cache() -> None:
    from pion_vllm_mlx.cache.lineage import LineageOptions
    from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache
    from tests.models import tiny_model

    model = tiny_model("llama")
    cache = LineageCache(LineageOptions(url="tcp://127.0.0.1:1"), CacheLimits())
    cache.attach(model, None)
    caches = _caches(model)
    model(_row([1, 2, 3]), cache=caches)
    image = -(1 << 59)
    cache.insert_cache("m", [1, image, 3], caches)
    assert cache.store is not None
    assert cache.store.stats().get("kept", 0) == 0
    assert cache.fetch_nearest_cache("m", [1, image, 3, 4])[1] == [4]
    assert cache.fetch_nearest_cache("m", [1, image - 1, 3, 4])[1] != [4]
    cache.close(1.0)


def test_a_seam_that_has_changed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from pion_vllm_mlx.errors import PionMlxCompatError
    from pion_vllm_mlx.serve.engine_mlx_lm_seams import check_seams

    check_seams()
    server: Any = importlib.import_module("mlx_lm.server")
    monkeypatch.setattr(server.ResponseGenerator, "_tokenize", lambda self, request: None)
    with pytest.raises(PionMlxCompatError, match="ResponseGenerator._tokenize takes"):
        check_seams()


def _row(tokens: list[int]) -> Any:
    import mlx.core as mx

    return mx.array(tokens)[None]


def _caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def test_a_reply_that_a_stop_sequence_ended_names_it(engine: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30, "temperature": 0}
    told = engine.request("/v1/chat/completions", {**body, **NO_END})[1]["choices"][0]
    said = "".join(one for one in told["message"]["content"] if one.isascii() and one.isalnum())
    word = said[len(said) // 2]
    for more in ({}, {"seed": 1}):
        asked = {**body, **NO_END, **more, "stop": [word, "never said"]}
        ended = engine.request("/v1/chat/completions", asked)[1]["choices"][0]
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", word)
    assert "stop_reason" not in told


def test_a_prefill_that_never_gets_anywhere_is_refused_at_the_start(
    tmp_path: Path, models: Path
) -> None:
    with pytest.raises(RuntimeError, match="--prefill-step-size must be at least 1"):
        with running_engine(tmp_path, models / "llama", "--no-pion", "--prefill-step-size", "0"):
            pass


def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="cannot be loaded") as refused:
        with running_engine(tmp_path, tmp_path / "empty", "--no-pion"):
            pass
    assert "Traceback" not in str(refused.value)


def test_a_client_that_leaves_before_anything_was_written_ends_its_reply(engine: Engine) -> None:
    body = {"prompt": "Left. " + TEXT, "max_tokens": 10**7, "stream": False, **NO_END}
    before = engine.forward
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", engine.running.port, timeout=60)
    ) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), AUTHORIZED)
        deadline = time.monotonic() + 60
        while engine.forward < before + 600 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert engine.forward >= before + 600
    # a request with a seed is served alone: it waits until nothing else is generated
    assert engine.complete("Still there?", seed=1).prompt
