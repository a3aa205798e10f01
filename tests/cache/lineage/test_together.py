"""Several at once: threads of one process, two processes, one server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, kind_options, prompt, same_reply
from tests.conftest import RunningServer
from tests.models import tiny_model

WORKER = Path(__file__).with_name("worker.py")


@pytest.mark.parametrize("kind", ["plain", "gated delta"])
def test_eight_stores_at_once_never_give_a_wrong_reply(kind: str, opened: Opener) -> None:
    """Same, extending and diverging prompts, each thread a store of its own.

    MLX runs one thread at a time, as in an engine; the stores' own threads run freely.
    """
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    mlx = threading.Lock()
    system = prompt(100, 1)
    plain = Engine(model, None, kv_bits)
    prompts = [system, [*system, *prompt(30, 2)], [*system[:70], *prompt(50, 3)], prompt(90, 4)]
    wanted = [plain.turn(ids) for ids in prompts]
    engines = [Engine(model, opened(model, **kind_options(kv_bits)), kv_bits) for _ in range(8)]
    failures: list[BaseException] = []

    def run(mine: int) -> None:
        try:
            for step in range(6):
                which = (mine + step) % len(prompts)
                with mlx:
                    turn = engines[mine].turn(prompts[which])
                assert turn.computed == len(prompts[which]) - turn.reused
                same_reply(turn, wanted[which])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    for engine in engines:
        assert engine.store is not None and engine.store.flush(60)
        assert engine.store.stats().get("damaged", 0) == 0, engine.store.stats()
    for ids in prompts:
        again = engines[0].turn(ids)
        assert again.reused == len(ids) - 1, "in the end everything is there"


@pytest.mark.parametrize("kind", ["plain", "window", "mamba"])
def test_two_processes_that_store_the_same_prompts_share_their_rows(
    kind: str, store: RunningServer, opened: Opener
) -> None:
    command = [sys.executable, str(WORKER), str(store.port), kind]
    workers = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(2)
    ]
    reports: list[dict[str, Any]] = []
    for worker in workers:
        out, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0
        reports.append(json.loads(out))
    assert [report["wrong"] for report in reports] == [0, 0]
    assert [report["damaged"] for report in reports] == [0, 0]
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    engine = Engine(model, opened(model, key_parts={"run": kind}), kv_bits)
    for seed in range(4):
        ids = [*prompt(80, 10), *prompt(40, 20 + seed)]
        assert engine.turn(ids, reply=1).reused == len(ids) - 1
    distinct = sum(report["bytes_rows"] for report in reports)
    alone = Engine(model, opened(model, key_parts={"run": f"{kind} alone"}), kv_bits)
    for seed in range(4):
        alone.turn([*prompt(80, 10), *prompt(40, 20 + seed)], reply=1)
        assert alone.store is not None and alone.store.flush(30)
    assert alone.store is not None
    once = alone.store.stats()["bytes_rows"]
    assert distinct <= 1.1 * once + 1, "what two processes store at once is stored once"


def test_matching_is_for_any_thread(opened: Opener) -> None:
    model = tiny_model("llama")
    store = opened(model)
    ids = prompt(100, 30)
    Engine(model, store).turn(ids, reply=1)
    assert store.flush()
    found: list[int] = []

    def look() -> None:
        for _ in range(20):
            found.append(store.match(ids).length)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [99] * 160
