"""The patch at other servers than the plain one: several workers, a password, embedded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pion_vllm_mlx
from pion_vllm_mlx import PionPromptCache
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids
from tests.patch.conftest import alone, forwards, furthest

IDS = token_ids(40)

pytestmark = pytest.mark.usefixtures("patched")


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[RunningServer]:
    folder.mkdir(mode=0o700)
    running = RunningServer(free_port_block(8), folder, flags)
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture(autouse=True)
def not_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


def right(model: Any, names: tuple[str, ...], **where: Any) -> set[str]:
    """The lanes over which caches of several namespaces gave the right logits."""
    wanted = alone(model, IDS, 3)
    with PionPromptCache(model, **where) as storing:
        for name in names:
            storing.get_or_prefill(IDS, name)
    with PionPromptCache(model, **where) as pc:
        for name in names:
            cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
            assert furthest(forwards(model, cache, 3), wanted) < 1e-5
        return set(pc.attention.queries)


def test_slots_of_several_workers_are_found_where_their_namespaces_are(tmp_path: Path) -> None:
    with server(tmp_path / "data", "-w", "2", "--independent-workers") as running:
        found = right(tiny_model("llama"), ("a", "b", "c", "d"), port=running.port)
    assert found == {"resp"}  # a binary lane leads to any worker


def test_a_password_opens_both_lanes(tmp_path: Path) -> None:
    with server(tmp_path / "data", "--requirepass", "open") as running:
        found = right(tiny_model("llama"), ("a",), port=running.port, password="open")
    assert found == {"binary"}


def test_an_embedded_server_attends_over_its_socket() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = right(tiny_model("gemma3_text"), ("a",), url=f"embedded://{folder}/data")
    assert found == {"resp"}
