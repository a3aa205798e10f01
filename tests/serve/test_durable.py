"""``serve --durable``: how often a reply is stored while it is generated."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from tests.conftest import running_server  # noqa: E402
from tests.serve.front import Front, running_front, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

ENGINE = "pion_vllm_mlx.serve.engine_mlx_lm"
TEXT = "The quick brown fox jumps over the lazy dog and naps. " * 11


def stores(front: Front, text: str, seed: int | None) -> int:
    """How often something was given to be stored for a reply of 60 tokens; all of it is then."""

    def kept() -> int:
        until(lambda: not front.request("/v1/pion/stats")[1].get("waiting"), "all is written")
        stats = front.request("/v1/pion/stats")[1]
        assert not stats.get("failed") and not stats.get("queue_full")
        return int(stats.get("kept", 0))

    before = kept()
    body = {"prompt": text + TEXT, "max_tokens": 60, "temperature": 0, "logit_bias": {"0": -100}}
    more = {} if seed is None else {"seed": seed}
    status, reply = front.request("/v1/completions", {**body, **more})
    assert status == 200 and reply["usage"]["completion_tokens"] == 60
    return kept() - before


@pytest.mark.parametrize("resume", [[], ["--no-resume"]], ids=["journal", "no journal"])
def test_a_reply_that_is_not_batched_is_stored_so_many_tokens_at_a_time(
    resume: list[str], tmp_path: Path
) -> None:
    """One that is batched at its end, as without the flag: docs/serve.md says so.

    What waits of it by the time the writing gets to it is written and flushed together.
    """
    model = make_folder(tmp_path / "llama", "llama")
    words = ["--model", str(model), "--pion-preload-gb", "0", "--durable", "8", *resume]
    with running_server(tmp_path / "data") as server:
        words += ["--pion-host", "127.0.0.1", "--pion-port", str(server.port)]
        with running_front(tmp_path, *words, engine=ENGINE) as front:
            assert stores(front, "seeded", seed=1) >= 1 + 60 // 8
            assert 1 <= stores(front, "batched", seed=None) <= 3
            assert "not_durable" not in front.request("/v1/pion/stats")[1]
