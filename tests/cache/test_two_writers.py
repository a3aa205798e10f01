"""Two processes store other texts under one namespace: a reader gets one whole, or a miss."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.cache import evaluation, inproc, prompt_cache_engine
from pion_vllm_mlx.cache.lanes import MAPPED, load_mapped
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from tests.cache.continuing import continued, unstored
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids

SEEDS = (0, 5)
PATIENT = 20.0
READS = ("loaded", "verified", "read in place")
#: so often each reader asks for each text, and so many hits it waits for.
ROUNDS, HITS = 20, 4
HANGS = 120.0

# Stores its text again whenever the other's lies there, until its input ends.
_WRITER = """
import select, sys, time
from pion_vllm_mlx import PionPromptCache
from tests.models import tiny_model, token_ids
family, url, seed = sys.argv[1:]
model, ids = tiny_model(family), token_ids(70, seed=int(seed))
with PionPromptCache(model, url=url, deadline_seconds=20.0) as pion:
    print("ready", flush=True)
    sys.stdin.readline()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        pion.get_or_prefill(ids, "shared")
    print(pion.stats()["bytes_stored"])
"""


@contextmanager
def writers(family: str, url: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two of them, which have begun."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _WRITER, family, url, str(seed)],
            cwd=Path(__file__).parents[2], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for seed in SEEDS
    ]  # fmt: skip
    try:
        for one in running:
            assert one.stdout is not None and one.stdout.readline() == "ready\n"
        for one in running:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        yield running
    finally:
        for one in running:
            one.kill()
            for stream in (one.stdin, one.stdout):
                if stream is not None:
                    stream.close()
            one.wait()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_reader_of_mapped_rows_gets_either_text_whole_or_a_miss(
    pion_server: RunningServer, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    # what the other lanes receive is hashed by the client
    monkeypatch.setattr(prompt_cache_engine, "LANES", {MAPPED: load_mapped})
    inproc.PROCESS.forget()
    model, url = tiny_model(family), f"tcp://127.0.0.1:{pion_server.port}"
    texts = [token_ids(70, seed=seed) for seed in SEEDS]
    wanted = [continued(model, unstored(model, ids)) for ids in texts]
    with contextlib.ExitStack() as opened:
        readers = {how: opened.enter_context(reader(model, url, how)) for how in READS}
        running = opened.enter_context(writers(family, url))
        given_up = time.monotonic() + HANGS
        asked = 0
        while asked < ROUNDS or any(one.hits < HITS for one in readers.values()):
            assert time.monotonic() < given_up, [one.stats() for one in readers.values()]
            asked += 1
            for how, one in readers.items():
                monkeypatch.setattr(evaluation, "on_cuda", lambda how=how: how == "read in place")
                for ids, right in zip(texts, wanted, strict=True):
                    assert continued(model, one.get_or_prefill(ids, "shared")) == right
                    # what the server names is what it says it is
                    assert "its rows does not match" not in str(one.last_miss_reason)
        for process in running:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("enough\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) > 0, "it has stored"
        for one in readers.values():
            assert one.misses and not one.stats()["bytes_stored"]


def reader(model: Any, url: str, how: str) -> PionPromptCache:
    """One that never stores."""
    verify = "always" if how == "verified" else None
    return PionPromptCache(
        model, url=url, admission_threshold=1 << 30, verify=verify, deadline_seconds=PATIENT
    )
