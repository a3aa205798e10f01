"""The counters of /v1/pion/stats have the same names, and mean the same, with either engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.serve.engine_vllm_mlx_app import added  # noqa: E402
from tests.conftest import RunningServer, running_server  # noqa: E402
from tests.serve.front import Front, running_front, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]
#: what one engine alone has: mlx-lm's copies beside the generation, vllm-mlx's own
ALONE = {"vllm_mlx"}
CHAT = "/v1/chat/completions"


def asked(front: Front, number: int) -> None:
    """A request of its own, and the same once more."""
    words = f"{number}: what is a prefix, and who keeps it?"
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 4, "temperature": 0}
    for _ in range(2):
        assert front.request(CHAT, body)[0] == 200


def counted(folder: Path, model: Path, engine: str, server: RunningServer) -> list[Json]:
    """The counters of an engine that is asked, and of another one after it."""
    words = ["--engine", engine, "--model", str(model), "--pion-preload-gb", "0"]
    words += ["--pion-host", "127.0.0.1", "--pion-port", str(server.port), "--no-resume"]
    module = f"pion_vllm_mlx.serve.engine_{engine.replace('-', '_')}"
    found = []
    for _ in range(2):
        with running_front(folder, *words, engine=module) as front:
            asked(front, 1)
            asked(front, 2)

            def told(front: Front = front) -> Json:
                stats: Json = front.request("/v1/pion/stats")[1]
                return stats

            until(lambda: told()["waiting"] == 0, "all is written")
            found.append(told())
            assert front.stop() == 0
    return found


def test_both_engines_tell_the_same_counters_by_the_same_names(tmp_path: Path) -> None:
    told = []
    for engine in ("mlx-lm", "vllm-mlx"):
        folder = tmp_path / engine
        folder.mkdir()
        with running_server(folder / "data") as server:
            told.append(counted(folder, make_folder(folder / "model"), engine, server))
    for mlx_lm, vllm_mlx in zip(*told, strict=True):
        assert set(mlx_lm) ^ set(vllm_mlx) == ALONE
        same = {"requests", "tokens_prompt", "tokens_reused", "restores", "hits_memory"}
        assert {name: mlx_lm[name] for name in same} == {name: vllm_mlx[name] for name in same}
        assert set(vllm_mlx["vllm_mlx"]) == {"kept_live", "replies_kept", "refused_live"}
    first, second = told[1]
    assert (first["hits_none"], first["hits_memory"], first["requests"]) == (1, 3, 4)
    assert (second["hits_mapped"], second["restores"]) == (2, 2)


def test_the_counters_of_several_models_are_added_up() -> None:
    one = {"requests": 2, "budget_bytes": 9, "bypass": None, "reading_ahead": False}
    one["allocator_bytes"] = 7  # of the process
    both = added([one, {**one, "requests": 3, "reading_ahead": True}])
    told = {"budget_bytes": 9, "allocator_bytes": 7, "bypass": None, "reading_ahead": True}
    assert both == {"requests": 5, **told}
