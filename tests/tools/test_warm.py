"""warm: what it stores is what serve finds, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("starlette")

from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.serve import options
from tests.conftest import RunningServer, running_server
from tests.serve.engines import running_engine
from tests.serve.front import running_front
from tests.serve.tiny_folder import make_folder
from tests.tools.commands import command

SYSTEM = "You are a careful helper who answers in one sentence. " * 3
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
MIN_GAIN = LineageOptions().min_gain
USER = {"role": "user", "content": "What is a prefix?"}
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_next", "gemma3_text"):
        make_folder(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("warm") / "data") as one:
        yield one


def store_of(server: RunningServer) -> tuple[str, ...]:
    return ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3_text"])
def test_serve_starts_where_warm_has_ended(
    server: RunningServer, models: Path, tmp_path: Path, family: str
) -> None:
    text, body = tmp_path / "system.txt", tmp_path / "body.json"
    text.write_text(SYSTEM + "\n")
    body.write_text(json.dumps({"messages": [SYSTEM_MESSAGE, USER], "tools": TOOLS}))
    model = ("--model", models / family)
    ran = command("warm", text, body, *model, "--json", *store_of(server))
    plain, tools = ran.json
    assert plain["tokens"] > len(SYSTEM) and tools["tokens"] > plain["tokens"]
    assert 0 < tools["computed"] <= tools["tokens"]
    with running_engine(tmp_path, models / family, *store_of(server)) as engine:
        for messages, more, warmed in (
            ([SYSTEM_MESSAGE, USER], {}, plain),
            ([SYSTEM_MESSAGE, {**USER, "content": "And a suffix?"}], {"tools": TOOLS}, tools),
        ):
            reply = engine.chat(messages, limit=1, **more)
            # read ahead is the latest, and the store is not asked for fewer tokens more than that
            spared = MIN_GAIN - 1 if reply.receipt["tier"] == "memory" else 0
            assert warmed["tokens"] - spared <= reply.cached <= warmed["tokens"], reply.receipt
            left = reply.prompt - reply.cached
            assert reply.forward == left + reply.usage["completion_tokens"]
            assert reply.receipt["tier"] in ("memory", "mapped", "stored")
    again = command("warm", text, body, *model, "--json", *store_of(server)).json
    assert [one["computed"] for one in again] == [0, 0]
    listed = {one["id"]: one for one in command("conversations", "--json", *at(server)).json}
    assert all(listed[one["conversation"]]["pinned"] for one in (plain, tools))


@pytest.mark.parametrize("kind", ["quantized", "draft"])
def test_other_caches_of_the_engine_are_warmed_under_its_flags(
    server: RunningServer, models: Path, tmp_path: Path, kind: str
) -> None:
    # mlx-lm quantizes from a number of tokens on, which is 5,000 unless it is told
    flags: tuple[str, ...] = ("--kv-bits", "8", "--kv-group-size", "32")
    flags += ("--quantized-kv-start", "0")
    if kind == "draft":
        flags = ("--draft-model", str(make_folder(tmp_path / "draft", num_hidden_layers=1)))
    elif "--kv-bits" not in command("serve", "--help").out:
        pytest.skip("this mlx-lm's server has no --kv-bits")
    text = tmp_path / "system.txt"
    text.write_text(f"{kind}: {SYSTEM}")
    model = models / "llama"
    ran = command("warm", text, "--model", model, "--json", *store_of(server), *flags)
    (warmed,) = ran.json
    assert warmed["computed"] == warmed["tokens"] > len(SYSTEM)
    messages = [{**SYSTEM_MESSAGE, "content": f"{kind}: {SYSTEM}"}, USER]
    with running_engine(tmp_path, model, *store_of(server), flags=flags) as engine:
        reply = engine.chat(messages, limit=2)
        assert reply.cached == warmed["tokens"], reply.receipt
    with running_engine(tmp_path, model, *store_of(server)) as engine:
        assert engine.chat(messages, limit=2).cached < 16  # other caches, another key


def at(server: RunningServer) -> tuple[str, str]:
    return "--url", f"tcp://127.0.0.1:{server.port}"


def test_what_was_warmed_for_one_api_key_is_for_that_one_alone(
    models: Path, tmp_path: Path
) -> None:
    body = tmp_path / "messages.json"  # Anthropic's; the header of an agent is no part of the key
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0; nonce=1"}
    body.write_text(json.dumps({"system": [header, {"type": "text", "text": SYSTEM}]}))
    data = tmp_path / "data"
    model = models / "llama"
    (warmed,) = command("warm", body, "--model", model, "--api-key", "a", "--json", data=data).json
    cached = {}
    for key in ("a", "b"):
        flags = ("--model", str(model), "--api-key", key)
        with running_front(tmp_path, *flags, engine=options.ENGINES["mlx-lm"].module) as front:
            asked = {"system": SYSTEM, "messages": [USER], "max_tokens": 1}
            status, reply = front.request("/v1/messages", asked, {"x-api-key": key})
            assert status == 200, reply
            cached[key] = reply["usage"]["cache_read_input_tokens"]
    assert cached == {"a": warmed["tokens"], "b": 0}


def test_what_cannot_be_warmed_is_named_and_the_rest_is_warmed(
    server: RunningServer, models: Path, tmp_path: Path
) -> None:
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("?")
    long.write_text(SYSTEM + "Twice.")
    model, store = ("--model", models / "llama"), store_of(server)
    ran = command("warm", short, long, *model, *store)
    assert ran.code == 1
    assert "short.txt: the system part is not stored" in ran.out
    assert "long.txt: " in ran.out and ", pinned as " in ran.out
    (again,) = command("warm", long, *model, *store, "--no-pin", "--json").json
    assert again["pinned"]  # it was, and is


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", b"\n", "is empty"),
        ("binary.txt", b"\xff\xfe", "no UTF-8"),
        ("broken.json", b"{", "not JSON"),
        ("list.json", b"[]", "JSON object"),
        ("nothing.json", b'{"messages": [{"role": "user", "content": "x"}]}', "neither a system"),
        ("wrong.json", b'{"messages": 3}', "messages"),
    ],
)
def test_a_file_that_is_no_system_prompt_is_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    from pion_vllm_mlx import cli

    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["warm", str(tmp_path / name), "--model", str(tmp_path / "no-model")]) == 1
    err = capsys.readouterr().err
    assert name in err and says in err


def test_wrong_usage_is_2_and_a_model_that_is_none_is_1(tmp_path: Path) -> None:
    text = tmp_path / "system.txt"
    text.write_text(SYSTEM)
    assert command("warm", text).code == 2
    assert command("warm", text, "--model", tmp_path, "--no-such-flag").code == 2
    for wrong in (("--chat-template-args", "[1]"), ("--prompt-cache-bytes", "lots")):
        ran = command("warm", text, "--model", tmp_path, *wrong)
        assert ran.code == 2 and wrong[0] in ran.err and "Traceback" not in ran.err
    assert "the model has no name" in command("warm", text, "--model", "").err
    for engine in ("mlx-lm", "vllm-mlx"):  # before either is loaded
        ran = command("warm", text, "--model", tmp_path / "none", "--engine", engine)
        assert ran.code == 1 and "there is no such folder" in ran.err
    (tmp_path / "none").mkdir()
    ran = command("warm", text, "--model", tmp_path / "none")
    assert ran.code == 1 and "cannot be loaded" in ran.err
