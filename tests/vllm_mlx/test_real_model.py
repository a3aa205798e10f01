"""The small real model behind vllm-mlx: what is reused is not computed, replies are the same.

Not part of the ordinary run: ``pytest --long``, with the demo's model made already.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.real_model import (  # noqa: E402
    LENGTHS,
    alone,
    load_real,
    real_folder,
    same_tokens,
    text_of,  # noqa: E402
)
from tests.vllm_mlx.engines import running_engine  # noqa: E402

LIMIT, MORE = 12, 8


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """The model's folder."""
    return real_folder(request.config)


@pytest.mark.timeout(1_800)
@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_in_a_new_engine_and_the_next_turn_compute_only_what_is_new(
    folder: Path, pion_server: RunningServer, length: int
) -> None:
    model, tokenizer = load_real(folder)
    ids = list(tokenizer.encode(text_of(tokenizer, length)))
    turn = [*ids, *ids[1 : 1 + MORE]]
    url = f"tcp://127.0.0.1:{pion_server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url)))
    with running_engine(lambda: load_real(folder)[0], tokenizer=tokenizer) as engine:
        first, computed = engine.computed(ids, LIMIT)
        assert (first.cached, computed) == (0, length)
        assert engine.cache.save_to_disk("")
    with running_engine(lambda: load_real(folder)[0], tokenizer=tokenizer) as engine:
        again, computed = engine.computed(ids, LIMIT)
        assert (again.cached, computed) == (length - 1, 1)
        following, computed = engine.computed(turn, LIMIT)
        # the reply's cache is kept, too: it gives the last token of the prompt, or not
        assert length - 1 <= following.cached <= length
        assert computed == len(turn) - following.cached
    whole = alone(model, tokenizer, ids, LIMIT)
    same_tokens(first.tokens, whole)
    same_tokens(again.tokens, whole)
    same_tokens(following.tokens, alone(model, tokenizer, turn, LIMIT))
