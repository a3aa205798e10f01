"""warm --engine vllm-mlx: what it stores is what serve --engine vllm-mlx finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.tools.commands import command  # noqa: E402
from tests.vllm_mlx.process import running_process  # noqa: E402

SYSTEM = "You are a careful helper who answers in one sentence. " * 3
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}
MIN_GAIN = LineageOptions().min_gain
USER = {"role": "user", "content": "What is a prefix?"}


@pytest.mark.timeout(300)  # six processes that import vllm-mlx, one after the other
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3_text"])
def test_serve_starts_where_warm_has_ended(
    pion_server: RunningServer, tmp_path: Path, family: str
) -> None:
    model = make_folder(tmp_path / family, family)
    text, body = tmp_path / "system.txt", tmp_path / "body.json"
    text.write_text(SYSTEM + "\n")
    body.write_text(json.dumps({"messages": [SYSTEM_MESSAGE, USER], "tools": TOOLS}))
    store = ("--pion-host", "127.0.0.1", "--pion-port", str(pion_server.port))
    words = (text, body, "--engine", "vllm-mlx", "--model", model, "--json", *store)
    plain, tools = command("warm", *words).json
    assert plain["tokens"] > len(SYSTEM) and tools["tokens"] > plain["tokens"]
    assert plain["computed"] == plain["tokens"] and 0 < tools["computed"] <= tools["tokens"]
    with running_process(tmp_path, model, *store) as engine:
        for messages, more, warmed in (
            ([SYSTEM_MESSAGE, USER], {}, plain),
            ([SYSTEM_MESSAGE, {**USER, "content": "And a suffix?"}], {"tools": TOOLS}, tools),
        ):
            reply = engine.chat(messages, 1, **more)
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            # behind the anchor stand the slack, and what every user's message begins with; read
            # ahead is the latest, and the store is not asked for fewer tokens more than that
            spared = MIN_GAIN - 1 if reply["pion"]["tier"] == "memory" else 0
            assert warmed["tokens"] - spared <= cached <= warmed["tokens"] + 4, reply["pion"]
            assert reply["pion"]["tier"] in ("memory", "mapped", "stored")
    again = command("warm", *words).json
    assert [one["computed"] for one in again] == [0, 0]
    url = ("--url", f"tcp://127.0.0.1:{pion_server.port}")
    listed = {one["id"]: one for one in command("conversations", "--json", *url).json}
    assert all(listed[one["conversation"]]["pinned"] for one in (plain, tools))
    asked = ("explain", "--request", body, "--port", 1, *words[2:])
    told = command(*asked).json
    assert told["restorable"] >= tools["tokens"] and told["key_field"] is None
    body.write_text(json.dumps({"messages": [{"role": "system", "content": SYSTEM + "!"}, USER]}))
    told = json.loads(command(*asked).out)
    assert 0 < told["common"] == told["position"]
    assert family != "llama" or told["restorable"] == told["common"]


def test_what_cannot_be_warmed_is_said_in_a_sentence(
    pion_server: RunningServer, tmp_path: Path
) -> None:
    text, short = tmp_path / "system.txt", tmp_path / "short.txt"
    text.write_text(SYSTEM + "\n")
    short.write_text("?")
    (tmp_path / "empty").mkdir()
    words = ("--engine", "vllm-mlx", "--pion-host", "127.0.0.1", "--pion-port", pion_server.port)
    none = command("warm", text, *words, "--model", tmp_path / "empty")
    assert none.code == 1 and "config" in none.err and "Traceback" not in none.err
    model = make_folder(tmp_path / "model")
    refused = command("warm", short, text, *words, "--model", model)
    assert refused.code == 1 and "fewer than are ever restored" in refused.out
    assert f"{text}: " in refused.out and "pinned as" in refused.out  # the other one is stored
