"""With vllm-mlx a setting is heeded, for its own request alone, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.serve.engine_vllm_mlx_refusals import refuse_ignored, refuse_parts  # noqa: E402
from tests.serve.front import Front, running_front  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
USES = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
FORCED = {"type": "function", "function": {"name": "look"}}
#: a token that the model never says by itself
T = 90


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("settings")
    model = make_folder(folder / "model", "llama")
    words = ["--engine", "vllm-mlx", "--model", str(model), "--no-pion"]
    engine = "pion_vllm_mlx.serve.engine_vllm_mlx"
    with running_front(folder, *words, engine=engine) as running:
        yield running


def ask(front: Front, path: str = CHAT, **asked: Any) -> tuple[int, Json]:
    given = {"max_tokens": 8, "temperature": 0, **HI, **asked}
    return front.request(path, {name: value for name, value in given.items() if value is not None})


def said(front: Front, **asked: Any) -> str:
    status, body = ask(front, **asked)
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_either_name_of_the_limit_ends_a_reply(front: Front, path: str) -> None:
    for limits in ({"max_tokens": None}, {"max_tokens": 6}):
        status, body = ask(front, path, **limits, max_completion_tokens=3)
        assert (status, body["usage"]["completion_tokens"]) == (200, 3)
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        (CHAT, {"temperature": 1, "seed": 7}, "seed"),
        (CHAT, {"temperature": None, "seed": 7}, "seed"),
        (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (CHAT, {"timeout": -1}, "timeout: must be a number of seconds above 0"),
        (COMPLETIONS, {"timeout": 0}, "timeout"),
        (COMPLETIONS, {"timeout": "nan"}, "timeout"),
        (COMPLETIONS, {"logit_bias": {"90": 100}}, "logit_bias"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (CHAT, {"tool_choice": {**FORCED, "function": {"name": "g"}}}, "no tool named 'g'"),
        (CHAT, {"tools": TOOLS, "tool_choice": {**FORCED, "function": {"name": "g"}}}, "'g'"),
        (MESSAGES, {"tools": [USES], "tool_choice": {"type": "tool", "name": "g"}}, "'g'"),
        (CHAT, {"tool_choice": "required"}, "tool_choice: there are no tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": "look"}, "tool_choice: this engine knows"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice: this engine"),
        (CHAT, {"temperature": 1, "xtc_probability": 0.5}, "xtc_probability"),
        (CHAT, {"repetition_penalty": 1.2, "repetition_context_size": 64}, "context_size"),
        (CHAT, {"presence_penalty": 1.2, "presence_context_size": 64}, "presence_context_size"),
        (CHAT, {"max_completion_tokens": "3"}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "content[0]: parts of type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "zzz"}]}]}, "'zzz'"),
        ("/v1/pion/explain", {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url'"),
    ],
)
def test_what_the_engine_would_ignore_is_refused_by_its_name(
    front: Front, path: str, more: Json, named: str
) -> None:
    status, body = ask(front, path, **more)
    assert status == 400
    assert named in body["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 7},
        {"top_k": 5},
        {"temperature": 3, "top_k": 1},
        {"top_k": 10**6, "timeout": 60},
        {"temperature": 1, "top_k": 0, "min_p": 1.0},
        {"temperature": 1, "top_k": -1, "min_p": 1.0},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1},
        {"logit_bias": {}, "xtc_probability": 0, "top_p": 1},
        {"tool_choice": "auto", "response_format": {"type": "text"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    ],
)
def test_what_changes_nothing_is_taken(front: Front, more: Json) -> None:
    assert said(front, **more) == said(front)


def test_only_the_likeliest_tokens_are_drawn_where_a_request_says_how_many(front: Front) -> None:
    plain = said(front)
    for path, read in ((CHAT, lambda one: one["message"]["content"]), (COMPLETIONS, _text)):
        wanted = read(ask(front, path)[1]["choices"][0])
        for _ in range(3):
            status, body = ask(front, path, temperature=3, top_k=1)
            assert (status, read(body["choices"][0])) == (200, wanted)
    # as many as there are, or more, is all of them: a step of every request would fail on it
    long: Json = {"temperature": 3, "max_tokens": 300, "logit_bias": {"0": -100.0}}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, front, **long, top_k=3)
        for count in (10**6, 264, 263):
            assert len({said(front, temperature=3, top_k=count) for _ in range(4)}) > 1
            assert said(front, temperature=3, top_k=1) == plain
        status, body = running.result()
    assert (status, body["usage"]["completion_tokens"]) == (200, 300)


def _text(choice: Json) -> str:
    return str(choice["text"])


def test_a_penalty_on_what_was_said_is_that_of_mlx_lm(front: Front, tmp_path: Path) -> None:
    model = make_folder(tmp_path / "model", "llama")
    asked = {"presence_penalty": 9.0, "max_tokens": 16}
    with running_front(
        tmp_path, "--model", str(model), "--no-pion", engine="pion_vllm_mlx.serve.engine_mlx_lm"
    ) as other:
        # vllm-mlx leaves markers of a chat out of what was said
        wanted = re.sub(r"<\|im_(start|end)\|>", "", said(other, **asked))
    assert said(front, **asked) == wanted != said(front, max_tokens=16)


def test_defaults_of_the_command_line_are_those_of_requests_that_say_nothing(
    tmp_path: Path, front: Front
) -> None:
    model = make_folder(tmp_path / "model", "llama")
    words = ["--engine", "vllm-mlx", "--model", str(model), "--no-pion"]
    words += ["--default-top-k", "1", "--default-temperature", "3"]
    words += ["--default-presence-penalty", "9"]
    wanted = said(front, presence_penalty=9.0)
    engine = "pion_vllm_mlx.serve.engine_vllm_mlx"
    with running_front(tmp_path, *words, engine=engine) as other:
        for _ in range(3):
            assert said(other, temperature=None) == wanted
        assert said(other, temperature=None, presence_penalty=0) == said(front)


@pytest.mark.parametrize("choice", ["auto", "required", "none", FORCED])
def test_a_choice_of_a_tool_that_is_there_is_taken(front: Front, choice: Any) -> None:
    said(front, tools=TOOLS, tool_choice=choice)


def test_biases_and_penalties_are_those_of_their_own_request_whatever_came_before(
    front: Front,
) -> None:
    plain = said(front)
    biased = said(front, logit_bias={str(T): 100})
    assert len(set(biased)) == 1 and biased != plain
    punished = said(front, repetition_penalty=5.0)
    assert punished not in (plain, biased)
    for _ in range(2):
        assert said(front) == plain
        assert said(front, repetition_penalty=5.0) == punished
        assert said(front, logit_bias={str(T): 100}) == biased


@pytest.mark.parametrize(
    "setting",
    [{"repetition_penalty": 5.0}, {"presence_penalty": 9.0}, {"thinking_token_budget": 3}],
)
def test_settings_that_look_at_tokens_see_the_same_ones_whatever_was_reused(
    front: Front, setting: Json
) -> None:
    for number in range(5):
        content = f"{number}{list(setting)[0]}: a question that nobody asked"
        asked = {**setting, "messages": [{"role": "user", "content": content}], "max_tokens": 24}
        cold, warm = (ask(front, **asked)[1] for _ in range(2))
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] < 20
        assert warm["pion"]["computed_tokens"] == 1
        assert warm["choices"] == cold["choices"]


def test_a_budget_of_thinking_is_spent_by_the_reply_alone(front: Front) -> None:
    letter = said(front, logit_bias={str(T): 100})[0]
    thought = [{"role": "assistant", "content": "<think>so</think>it is"}, *HI["messages"]]
    for messages in (HI["messages"], [*HI["messages"], *thought]):
        for _ in range(2):
            budget = {"messages": messages, "thinking_token_budget": 3, "logit_bias": {str(T): 100}}
            assert said(front, **budget) == 3 * letter + "</think>" + 4 * letter


def test_biases_and_penalties_are_those_of_their_own_request_whatever_runs_beside(
    front: Front,
) -> None:
    long = {"role": "user", "content": "hello " * 900}  # is in its prefill when others come
    kinds: list[Json] = [{}, {"logit_bias": {str(T): 100}}, {"repetition_penalty": 5.0}]
    asked = [{**kind, **more} for more in ({}, {"messages": [long]}) for kind in kinds] * 2
    alone = [said(front, **one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        for _ in range(3):
            assert list(pool.map(lambda one: said(front, **one), asked)) == alone


@pytest.mark.parametrize("beside", [{"temperature": 3}, {"temperature": 0}])
def test_a_request_is_sampled_as_it_asks_whatever_runs_beside(front: Front, beside: Json) -> None:
    plain, limit = said(front), {"max_tokens": 800}
    long: Json = {**beside, **limit, "logit_bias": {"0": -100.0}}  # does not end by itself
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, front, **long)
        for _ in range(5):
            assert said(front) == plain
            assert len({said(front, temperature=3) for _ in range(3)}) > 1
        status, body = running.result()
    text = body["choices"][0]["message"]["content"]
    assert (status, body["usage"]["completion_tokens"]) == (200, 800)
    assert text.startswith(plain) == (beside["temperature"] == 0)


def test_a_schema_that_fails_ends_its_own_reply_alone(front: Front) -> None:
    """That of a request that cannot be computed here: it wants a kernel in Metal."""
    schema = {"name": "x", "strict": True, "schema": {"type": "object", "properties": {}}}
    strict = {"response_format": {"type": "json_schema", "json_schema": schema}}
    long = {"max_tokens": 800, "logit_bias": {"0": -100.0}}
    alone = said(front, **long)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(said, front, **long)
        for _ in range(4):
            ask(front, **strict)
        assert running.result() == alone


def test_what_fails_once_ends_the_reply_and_is_not_asked_again() -> None:
    import mlx.core as mx

    from pion_vllm_mlx.serve.engine_vllm_mlx_samplers import failing_alone

    calls: list[int] = []

    def fails(tokens: Any, logits: Any) -> Any:
        calls.append(1)
        raise ValueError("no")

    logits = mx.zeros((1, 8))
    guarded = failing_alone(fails, [3, 5])
    for _ in range(2):
        assert mx.argmax(guarded(mx.array([1]), logits)).item() == 3
        assert (guarded(mx.array([1]), logits) == 0).tolist() == [[i in (3, 5) for i in range(8)]]
    assert len(calls) == 1
    assert failing_alone(lambda tokens, logits: logits + 1, [3])(None, logits).tolist() == [[1] * 8]


@pytest.mark.parametrize(("path", "content"), [(MESSAGES, []), (CHAT, None)])
def test_a_message_of_nothing_is_no_fault_of_the_engine(
    front: Front, path: str, content: list[Json] | None
) -> None:
    status, _ = ask(front, path, messages=[{"role": "user", "content": content}])
    assert status == (400 if path == MESSAGES else 200)


def test_a_model_that_sees_reads_images_and_has_settings_of_its_own() -> None:
    seen = {"messages": [{"role": "user", "content": [IMAGE]}], "top_k": 5, "temperature": 1}
    refuse_parts(seen, sees=True)
    refuse_ignored({**seen, "presence_penalty": 1.0}, chat=True)
    for wrong in ({"type": "input_audio"}, {"type": ["text"]}, {}, "text"):
        with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]"):
            parts = [{"type": "text", "text": "x"}, wrong]
            refuse_parts({"messages": [{"role": "user", "content": parts}]}, sees=True)
    for strange in ({}, {"messages": 5}, {"messages": [5]}, {"messages": [{"content": "x"}]}):
        refuse_parts(strange, sees=False)
