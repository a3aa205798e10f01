"""Clients that leave while their prompt waits or is prefilled: nobody waits for it any more."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.engine_child import KEY
from tests.serve.engines import Engine
from tests.serve.served import LIMIT, NO_END, SEEDED, serving

AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
LONG, STEP, CLIENTS = 6000, 32, 3
FLAGS = ("--prefill-step-size", str(STEP))
#: steps that take their time, so that those in which mlx-lm does not look are a small part.
SLOW = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}


@contextlib.contextmanager
def asked(engine: Engine, number: int, **more: Any) -> Iterator[None]:
    """A client with a long prompt, who leaves at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.running.port, timeout=60)
    with contextlib.closing(connection):
        body = {"prompt": f"{number}" * LONG, "max_tokens": 10**6, **NO_END, **more}
        connection.request("POST", "/v1/completions", json.dumps(body), AUTHORIZED)
        yield


def until_seen(engine: Engine, tokens: int) -> None:
    deadline = time.monotonic() + 60
    while engine.forward < tokens and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.forward >= tokens


@pytest.fixture(scope="module", params=[(), ("--no-pion",)], ids=["store", "no store"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("left")
    with serving(folder, "llama", *FLAGS, *request.param, **SLOW) as served:
        yield served.engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("more", [{}, SEEDED], ids=["batched", "single"])
def test_a_prompt_that_was_given_up_is_not_computed_to_its_end(
    engine: Engine, more: dict[str, Any], stream: bool
) -> None:
    before = engine.forward
    first = 1 + 3 * (2 * bool(more) + stream)
    with contextlib.ExitStack() as clients:
        for number in range(CLIENTS):
            clients.enter_context(asked(engine, first + number, stream=stream, **more))
        until_seen(engine, before + 2 * STEP)
    assert engine.complete("Still there?", 1, **more).prompt
    assert engine.forward - before < LONG // 2
    assert "Traceback" not in engine.output()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_who_stays_in_the_batch_gets_what_he_would_get_alone(tmp_path: Path, family: str) -> None:
    text = "He stays. " * 100
    with serving(tmp_path, family, *FLAGS) as served, ThreadPoolExecutor(1) as pool:
        engine = served.engine
        with asked(engine, 1):
            until_seen(engine, STEP)
            stays = pool.submit(engine.complete, text, LIMIT)
            until_seen(engine, 8 * STEP)
        served.check(stays.result(120), served.tokenizer.encode(text))
        served.complete(text)
