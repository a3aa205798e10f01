"""The whole of ``serve`` on mlx-lm: SDKs, the front, the engine, the store, and a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.conftest import running_server
from tests.serve.front import Front, running_front, until

pytest.importorskip("mlx_lm")

ENGINE = "pion_vllm_mlx.serve.engine_mlx_lm"
SYSTEM = "Be good, be brief, and be there for those who ask. " * 8


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """serve, on a tiny hybrid model."""
    from tests.serve.tiny_folder import make_folder

    folder = tmp_path_factory.mktemp("serve")
    model = make_folder(folder / "qwen3_5", "qwen3_5")
    with running_server(folder / "data") as server:
        store = ["--pion-host", "127.0.0.1", "--pion-port", str(server.port)]
        with running_front(folder, "--model", str(model), *store, engine=ENGINE) as front:
            yield front


def asked(front: Front, said: str) -> Any:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": said},
    ]
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client:
        return client.chat.completions.create(
            model="any", messages=messages, max_tokens=6, temperature=0
        )


def stored(front: Front) -> bool:
    return not front.request("/v1/pion/stats")[1].get("waiting")


def test_usage_and_receipt_reach_the_client_of_every_api(serving: Front) -> None:
    first = asked(serving, "What is a prefix?")
    again = asked(serving, "What is a prefix?")
    size = again.usage.prompt_tokens
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == size - 1
    assert again.model_extra["pion"]["reused_tokens"] == size - 1
    with anthropic.Anthropic(base_url=serving.url, api_key="x", max_retries=0) as client:
        user: Any = [{"role": "user", "content": "What is a prefix?"}]
        used = client.messages.create(model="any", system=SYSTEM, messages=user, max_tokens=6).usage
        counted = client.messages.count_tokens(model="any", system=SYSTEM, messages=user)
        with client.messages.stream(
            model="any", system=SYSTEM, messages=user, max_tokens=6
        ) as streamed:
            (begun,) = (
                one.message.usage.model_copy()  # the SDK adds to its own later
                for one in streamed
                if one.type == "message_start"
            )
    assert (used.input_tokens, used.cache_read_input_tokens) == (1, size - 1)
    assert counted.input_tokens == size
    # before the first word of the reply
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (1, size - 1)


def test_another_conversation_begins_behind_the_system_prompt(serving: Front) -> None:
    asked(serving, "Where are we?")
    other = asked(serving, "Nowhere!")
    assert other.usage.prompt_tokens_details.cached_tokens >= len(SYSTEM)


def test_after_a_kill_the_next_engine_finds_the_conversation(serving: Front) -> None:
    said = "Will you be back?"
    first = asked(serving, said)
    until(lambda: stored(serving), "the conversation is stored")
    pids = serving.engine_pids()
    os.kill(pids[-1], signal.SIGKILL)
    until(lambda: "engine ended with code" in serving.output(), "the front noticed")
    again = asked(serving, said)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.model_extra["pion"]["tier"] in ("memory", "mapped", "stored")
    told = serving.request("/v1/pion/stats")[1]
    assert told["restores"] + told.get("read_ahead", 0) >= 1
    assert len(serving.engine_pids()) == len(pids) + 1
