"""The end of a system prompt, stored by one engine, is where the next one goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage.policy import LEAST_NEW_TOKENS, anchor_length  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.vllm_mlx.process import running_process  # noqa: E402

SYSTEM = {"role": "system", "content": "You answer in one word. " * 6}
FIRST, SECOND = ([SYSTEM, {"role": "user", "content": said}] for said in ("Hello?", "What else?"))


@pytest.mark.timeout(300)  # two engines, one after the other
@pytest.mark.parametrize("family", ["qwen3_5", "mamba"])
def test_another_question_to_a_new_process_starts_behind_the_system_prompt_that_was_stored(
    tmp_path: Path, pion_server: RunningServer, family: str
) -> None:
    from mlx_lm import load

    model = make_folder(tmp_path / "model", family)
    tokenizer = load(str(model))[1]
    anchor = anchor_length(*(tokenizer.apply_chat_template(one) for one in (FIRST, SECOND)))
    flags = ("--pion-host", "127.0.0.1", "--pion-port", str(pion_server.port))
    flags += ("--pion-preload-gb", "0")
    with running_process(tmp_path, model, *flags) as engine:
        first, computed = engine.computed(FIRST)
        assert computed == first["usage"]["prompt_tokens"] < LEAST_NEW_TOKENS, "it has no guard"
        assert engine.stop() == 0
    with running_process(tmp_path, model, *flags) as engine:
        found, computed = engine.computed(SECOND)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == anchor
    assert computed == found["usage"]["prompt_tokens"] - anchor
    assert found["pion"]["tier"] in ("mapped", "stored")
    assert anchor > len(SYSTEM["content"])
