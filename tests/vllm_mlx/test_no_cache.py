"""--disable-prefix-cache: nothing is reused, and everything else is as with a cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from tests.serve.tiny_folder import make_folder  # noqa: E402
from tests.vllm_mlx.process import running_process  # noqa: E402

QUESTIONS = [f"{number}: {'word ' * (3 + 20 * number)}" for number in range(6)]


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next"])
def test_without_a_prefix_cache_nothing_is_reused_and_replies_are_the_same(
    tmp_path: Path, family: str
) -> None:
    model = make_folder(tmp_path / family, family)
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]

    def answers(*flags: str) -> tuple[list[Any], list[int]]:
        """To the questions one by one and at once; what was reused."""
        with running_process(tmp_path, model, *flags) as engine:
            alone = [engine.chat(one, 12) for one in asked]
            with ThreadPoolExecutor(len(asked)) as pool:
                at_once = list(pool.map(lambda one: engine.chat(one, 12), asked))
            biased = engine.chat(asked[0], 4, logit_bias={"90": 100.0})
            told = [one["choices"] for one in (*alone, *at_once, biased)]
            reused = [one["pion"]["reused_tokens"] for one in (*alone, *at_once, biased)]
            assert flags == ("--no-pion",) or biased["pion"]["why"].startswith("--disable-prefix")
            assert engine.stats() == {"pion": "disabled"}
            return told, reused

    without, none = answers("--disable-prefix-cache")
    kept, some = answers("--no-pion")
    assert without == kept
    assert not any(none) and all(some[len(asked) :])
