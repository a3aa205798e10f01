"""The engine as a process, over HTTP: what it says it reused, and that kills cost nothing else."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from tests.conftest import RunningServer  # noqa: E402
from tests.serve.front import refused_at_start, running_front, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.small_disk import fill, small_disk  # noqa: E402
from tests.vllm_mlx.process import EngineProcess, greedy, running_process  # noqa: E402

SYSTEM = {"role": "system", "content": "You answer in one word. " * 20}
HELLO = [SYSTEM, {"role": "user", "content": "Hello there"}]
OTHER = [SYSTEM, {"role": "user", "content": "What else?"}]
TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def store(server: RunningServer) -> list[str]:
    """The flags of a store at ``server``."""
    return ["--pion-host", "127.0.0.1", "--pion-port", str(server.port)]


def cached(answer: dict[str, Any]) -> int:
    """What an OpenAI answer says was reused."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a plain family."""
    return make_folder(tmp_path_factory.mktemp("plain") / "model", "llama")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of a hybrid."""
    return make_folder(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_next")


@pytest.fixture(scope="module")
def engine(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A hybrid without a store."""
    folder = tmp_path_factory.mktemp("engine")
    with running_process(folder, hybrid, "--no-pion") as process:
        yield process


def test_usage_and_receipt_say_what_was_reused_in_every_api(engine: EngineProcess) -> None:
    first = engine.chat(HELLO)
    count = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    repeat, computed = engine.computed(HELLO)
    assert (cached(repeat), computed) == (count - 1, 1)
    assert repeat["choices"] == first["choices"]
    assert repeat["pion"]["reused_tokens"] == count - 1
    assert (repeat["pion"]["tier"], repeat["pion"]["computed_tokens"]) == ("memory", 1)
    body = {**greedy(4), "messages": HELLO, "stream_options": {"include_usage": True}}
    assert cached(engine.events("/v1/chat/completions", body)[-1]) == count - 1
    engine.complete(TEXT)
    streamed = engine.events("/v1/completions", {**greedy(4), "prompt": TEXT})
    assert cached(streamed[-1]) == streamed[-1]["usage"]["prompt_tokens"] - 1
    asked = {**greedy(4), "messages": HELLO[1:], "system": SYSTEM["content"]}
    status, answer = engine.ask("/v1/messages", asked)
    usage = answer["usage"]
    assert (status, usage["input_tokens"], usage["cache_read_input_tokens"]) == (200, 1, count - 1)
    delta = [e for e in engine.events("/v1/messages", asked) if e["type"] == "message_delta"][-1]
    assert delta["usage"]["cache_read_input_tokens"] == count - 1
    spoken = {"model": "default", "max_output_tokens": 4, "input": TEXT, "temperature": 0.0}
    engine.ask("/v1/responses", spoken)
    status, answer = engine.ask("/v1/responses", spoken)
    usage = answer["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


def test_another_question_under_the_same_system_prompt_starts_behind_the_anchor(
    engine: EngineProcess,
) -> None:
    system = {"role": "system", "content": "Only verbs, please. " * 20}
    empty = {"model": "default", "messages": [system, {"role": "user", "content": ""}]}
    count = engine.ask("/v1/pion/count_tokens", empty)[1]["input_tokens"]
    engine.chat([system, {"role": "user", "content": "Hello there"}])
    other, computed = engine.computed([system, {"role": "user", "content": "What else?"}])
    assert computed == other["usage"]["prompt_tokens"] - cached(other)
    # Behind the system message stand the user's header and the assistant's.
    assert count - 30 < cached(other) < count


def test_many_prompts_in_one_request_are_added_up(engine: EngineProcess) -> None:
    prompts = ["One sentence of its own. " * 4, "And another one, longer than it. " * 4]
    body = {**greedy(2), "prompt": prompts}
    engine.ask("/v1/completions", body)
    status, answer = engine.ask("/v1/completions", body)
    assert status == 200
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 2


def test_count_tokens_is_the_prompt_that_chat_computes(engine: EngineProcess) -> None:
    status, counted = engine.ask("/v1/pion/count_tokens", {"model": "default", "messages": OTHER})
    assert (status, counted["input_tokens"]) == (200, engine.chat(OTHER)["usage"]["prompt_tokens"])
    status, refused = engine.ask("/v1/pion/count_tokens", {"model": "default", "messages": 3})
    assert status in (400, 422)


def test_only_the_front_is_answered(engine: EngineProcess) -> None:
    for path in ("/health", "/v1/models", "/v1/pion/stats"):
        assert engine.ask(path, key="another")[0] == 401
        assert engine.ask(path)[0] == 200
    messages = {"messages": OTHER}  # the model's name is the engine's own where none is given
    assert engine.ask("/v1/pion/count_tokens", messages)[0] == 200


def test_stats_without_a_store_say_so(engine: EngineProcess) -> None:
    for _ in range(2):
        engine.chat(HELLO)
    status, stats = engine.ask("/v1/pion/stats")
    assert (status, stats) == (200, {"pion": "disabled"})


@pytest.mark.timeout(300)  # six engines, one after the other
def test_a_restarted_engine_continues_what_the_old_one_was_killed_in(
    tmp_path: Path, pion_server: RunningServer, plain: Path, hybrid: Path
) -> None:
    """SIGKILL in the middle of a streamed reply; the prompt was kept when its prefill ended."""
    for model in (plain, hybrid):
        with running_process(tmp_path, model, "--no-pion") as engine:
            expected = engine.chat(HELLO)
        with running_process(tmp_path, model, *store(pion_server)) as engine:
            body = {**greedy(4000), "messages": HELLO, "stream": True}
            with engine.open("/v1/chat/completions", body) as stream:
                while '"content"' not in stream.readline().decode():
                    pass
                until_written(engine)
                engine.stop(signal.SIGKILL)
        with running_process(tmp_path, model, *store(pion_server)) as engine:
            reply, computed = engine.computed(HELLO)
            assert reply["choices"] == expected["choices"]
            assert (cached(reply), computed) == (reply["usage"]["prompt_tokens"] - 1, 1)
            assert reply["pion"]["tier"] in ("memory", "mapped", "stored")
            assert engine.stop() == 0


def until_written(engine: EngineProcess) -> None:
    """Wait until the background thread has stored what was kept."""
    while True:
        assert engine.child.process.poll() is None, engine.output()
        stats = engine.ask("/v1/pion/stats")[1]
        if 0 < stats.get("kept", 0) <= stats.get("written", 0):  # none before a store is there
            return
        time.sleep(0.02)


def test_a_server_killed_under_the_engine_and_back_again(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    with running_process(tmp_path, plain, *store(pion_server)) as engine:
        first, computed = engine.computed(HELLO)
        count = first["usage"]["prompt_tokens"]
        assert (cached(first), computed) == (0, count)
        until_written(engine)
        pion_server.kill()
        again, computed = engine.computed(HELLO)
        assert again["choices"] == first["choices"]
        assert (cached(again), computed) == (count - 1, 1)
        during, computed = engine.computed([SYSTEM, {"role": "user", "content": "Is it away?"}])
        assert during["usage"]["completion_tokens"] == 6
        assert len(SYSTEM["content"]) < cached(during) < during["usage"]["prompt_tokens"]
        assert computed == during["usage"]["prompt_tokens"] - cached(during)
        pion_server.start()
        assert engine.stop() == 0
    with running_process(tmp_path, plain, *store(pion_server)) as engine:
        again, computed = engine.computed(HELLO)
        assert again["choices"] == first["choices"]
        assert (cached(again), computed) == (count - 1, 1)


def test_engine_and_server_killed_at_once(
    tmp_path: Path, pion_server: RunningServer, hybrid: Path
) -> None:
    with running_process(tmp_path, hybrid, *store(pion_server)) as engine:
        first = engine.chat(HELLO)
        until_written(engine)
        pion_server.kill()
        engine.stop(signal.SIGKILL)
    pion_server.start()
    with running_process(tmp_path, hybrid, *store(pion_server)) as engine:
        reply, computed = engine.computed(HELLO)
        assert reply["choices"] == first["choices"]
        assert (cached(reply), computed) == (reply["usage"]["prompt_tokens"] - 1, 1)


def test_explain_names_the_first_token_that_differs(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    clock = "You answer in one word. It is {} o'clock. " + "And politely. " * 20
    asked = [
        [{"role": "system", "content": clock.format(hour)}, HELLO[1]] for hour in ("nine", "five")
    ]
    with running_process(tmp_path, plain, *store(pion_server)) as engine:
        assert "no request has missed" in engine.ask("/v1/pion/explain", {})[1]["sentence"]
        engine.chat(asked[0])
        until_written(engine)
        status, told = engine.ask("/v1/pion/explain", {"model": "default", "messages": asked[1]})
        assert status == 200
        assert (told["stored_text"]["token"], told["asked_text"]["token"]) == ("n", "f")
        assert told["asked_text"]["before"].endswith("It is ")
        assert told["prompt_tokens"] == engine.chat(asked[1])["usage"]["prompt_tokens"]
        text = {"model": "default", "prompt": clock.format("six"), "max_tokens": 2}
        status, told = engine.ask("/v1/pion/explain", text)
        reply = engine.ask("/v1/completions", text)[1]
        assert (status, told["prompt_tokens"]) == (200, reply["usage"]["prompt_tokens"])


def test_the_last_miss_is_explained_as_things_were_then(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    clock = "You answer in one word. It is {} o'clock. " + "And politely. " * 20
    with running_process(tmp_path, plain, *store(pion_server)) as engine:
        for hour in ("nine", "five"):
            engine.chat([{"role": "system", "content": clock.format(hour)}, HELLO[1]])
            until_written(engine)
        told = engine.ask("/v1/pion/explain", {})[1]
        assert (told["stored_text"]["token"], told["asked_text"]["token"]) == ("n", "f")
        assert told["restorable"] == told["position"] == told["common"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": ""}, "no tokens"),
        ("/v1/completions", {"prompt": "", "stream": True}, "no tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"99999": 1.0}}, "logit_bias"),
        # of the model, whose tokenizer has none like it
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"263": 1.0}}, "one is 262"),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"-1": 1.0}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"x": 1.0}}, "logit_bias"),
    ],
)
def test_what_a_step_of_all_requests_would_fail_on_costs_its_own_request_alone(
    engine: EngineProcess, path: str, body: dict[str, Any], named: str
) -> None:
    others = {**greedy(300), "messages": HELLO, "stream": True}
    with engine.open("/v1/chat/completions", others) as answer:
        answer.readline()
        asked = {**greedy(2), **body}
        if body.get("stream"):
            (told,) = engine.events(path, asked)
            assert told["error"]["code"] == 400
        else:
            status, told = engine.ask(path, asked)
            assert status == 400
        rest = answer.read()
    assert named in str(told)
    assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest
    bias = {"0": -100.0, "262": 1.5}
    assert engine.chat(HELLO, logit_bias=bias)["usage"]["completion_tokens"] > 0


def test_serve_passes_flags_on_and_tells_what_was_reused_in_its_own_apis(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    words = ["--engine", "vllm-mlx", "--model", str(plain), "--max-num-seqs", "4"]
    words += store(pion_server)
    with running_front(tmp_path, *words, engine="pion_vllm_mlx.serve.engine_vllm_mlx") as front:
        asked = {**greedy(4), "messages": HELLO[1:], "system": SYSTEM["content"]}
        first = front.request("/v1/messages", asked)[1]
        again = front.request("/v1/messages", asked)[1]
        assert again["content"] == first["content"]
        assert first["usage"].get("cache_read_input_tokens", 0) == 0
        read = again["usage"]["cache_read_input_tokens"]
        assert read == first["usage"]["input_tokens"] - 1
        status, stats = front.request("/v1/pion/stats")
        assert (status, stats["tokens_reused"]) == (200, read)
        assert front.stop() == 0


def test_flags_that_choose_another_cache_are_refused_by_name(tmp_path: Path, plain: Path) -> None:
    for flag in (["--use-paged-cache"], ["--no-memory-aware-cache"], ["--ssd-cache-dir", "x"]):
        with pytest.raises(RuntimeError, match=f"{flag[0]} cannot be used"):
            with running_process(tmp_path, plain, *flag):
                pass


@pytest.mark.parametrize("flag", ["--no-such-flag", "--use-paged-cache"])
def test_flags_that_the_engine_refuses_end_a_serve_that_loads_on_demand(
    tmp_path: Path, plain: Path, flag: str
) -> None:
    flags = ("--unload-after", "60", "--model", str(plain), flag)
    said = refused_at_start(tmp_path, "pion_vllm_mlx.serve.engine_vllm_mlx", *flags)
    assert flag in said.partition("error: ")[2]
    assert "refuses the flags that serve was started with" in said
    assert "engine ready" not in said and "Traceback" not in said


@pytest.mark.parametrize("nowhere", ["hub", "folder", "weights"])
def test_a_model_that_is_nowhere_ends_the_start_in_a_sentence(
    tmp_path: Path, nowhere: str
) -> None:
    name = "nobody/nothing"
    if nowhere == "folder":
        (tmp_path / "empty").mkdir()
        name = str(tmp_path / "empty")
    elif nowhere == "weights":
        name = str(make_folder(tmp_path / "model"))
        (tmp_path / "model" / "model.safetensors").unlink()
    flags = ("--engine", "vllm-mlx", "--model", name, "--download-retries", "1")
    said = refused_at_start(tmp_path, "pion_vllm_mlx.serve.engine_vllm_mlx", *flags)
    assert name in said.partition("ERROR:" if nowhere == "weights" else "rror: ")[2]
    assert "Traceback" not in said


def test_events_split_and_joined_at_any_byte_are_completed_all_the_same() -> None:
    from pion_vllm_mlx.cache.vllm_mlx_backend_tally import Tally
    from pion_vllm_mlx.cache.vllm_mlx_backend_usage import Answer

    events = [{"choices": [], "usage": None}, {"choices": [], "usage": {"prompt_tokens": 9}}]
    whole = b": keepalive\n\n"
    whole += b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    whole += b"data: [DONE]\n\n"
    for size in range(1, len(whole) + 1):
        answer = Answer(lambda: Tally(9, 8))
        said = b"".join(
            answer.events(whole[at : at + size], at + size < len(whole))
            for at in range(0, len(whole), size)
        )
        lines = [line for line in said.split(b"\n") if line.startswith(b"data: {")]
        usage = json.loads(lines[1][6:])["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
        prompt = {"prompt_tokens": 9, "cached_tokens": 8}
        assert json.loads(lines[0][6:]) == {**events[0], "pion_prompt": prompt}
        assert "pion_prompt" not in json.loads(lines[1][6:])
        assert said.startswith(b": keepalive\n\n")
        assert said.endswith(b"data: [DONE]\n\n")


def test_a_budget_below_one_conversation_costs_the_store_and_nothing_else(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    with running_process(tmp_path, plain, "--no-pion") as engine:
        expected = engine.chat(HELLO)
    flags = [*store(pion_server), "--pion-budget-gb", "0.0001"]
    with running_process(tmp_path, plain, *flags) as engine:
        for _ in range(2):
            assert engine.chat(HELLO)["choices"] == expected["choices"]
        until(lambda: engine.stats().get("over_budget", 0) >= 1, "the store says no")
        assert engine.stop() == 0
    with running_process(tmp_path, plain, *flags) as engine:
        again = engine.chat(HELLO)
        assert (again["choices"], cached(again)) == (expected["choices"], 0)


def test_a_full_disk_costs_the_store_and_nothing_else(
    tmp_path: Path, pion_server: RunningServer, plain: Path
) -> None:
    with running_process(tmp_path, plain, "--no-pion") as engine:
        expected = engine.chat(HELLO)
    pion_server.stop()
    with small_disk(tmp_path / "small", 24 << 20) as disk:
        (disk / "data").mkdir(mode=0o700)
        full = RunningServer(pion_server.port, disk / "data").start()
        try:
            with running_process(tmp_path, plain, *store(full)) as engine:
                fill(disk / "filler")
                for _ in range(2):
                    assert engine.chat(HELLO)["choices"] == expected["choices"]
                until(lambda: engine.stats().get("failed", 0) >= 1, "the store fails")
                (disk / "filler").unlink()
                written = engine.stats().get("written", 0)
                other = engine.chat(OTHER)
                until(lambda: engine.stats().get("written", 0) > written, "it is stored")
                assert engine.stop() == 0
            with running_process(tmp_path, plain, *store(full)) as engine:
                found, computed = engine.computed(OTHER)
                assert found["choices"] == other["choices"]
                assert (cached(found), computed) == (found["usage"]["prompt_tokens"] - 1, 1)
                assert engine.chat(HELLO)["choices"] == expected["choices"]
        finally:
            full.stop()


@pytest.mark.parametrize("template", ["{{ raise_exception('no such chat') }}", "{{ 1 / 0 }}"])
def test_a_template_s_refusal_is_the_request_s_fault(engine: EngineProcess, template: str) -> None:
    settings = {"chat_template_kwargs": {"chat_template": template}}
    body = {**greedy(1), "messages": HELLO, **settings}
    status, told = engine.ask("/v1/chat/completions", body)
    assert (status, "the chat template refuses" in str(told)) == (400, True)
    event = engine.events("/v1/chat/completions", body)[-1]
    assert (event["error"]["code"], "template" in event["error"]["message"]) == (400, True)
