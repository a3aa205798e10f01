"""The demo's real model for tests that are asked for by ``--long``, and what it says by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pion_vllm_mlx
from pion_vllm_mlx.errors import ConfigError

#: around a block, a window and a step of a prefill.
LENGTHS = (63, 64, 65, 511, 512, 513, 2_047, 2_048, 2_049)
NEAR = 1e-3
TEXT = Path(pion_vllm_mlx.__file__).parent / "demo" / "harbour.txt"


class Said(NamedTuple):
    """A token of a reply, how far the next best is behind it, and its log probability."""

    token: int
    ahead: float
    logprob: float


def real_folder(config: Any) -> Path:
    """The folder of the model; skips the test where it was not asked for, or is not there."""
    if not config.getoption("--long"):
        pytest.skip("takes minutes: --long runs it")
    from pion_vllm_mlx.demo.model import ensure_model

    try:
        return ensure_model(quiet=True)
    except (ConfigError, ImportError) as error:
        pytest.skip(f"needs the demo extra: {error}")


def load_real(folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    from mlx_lm import load

    model, tokenizer = load(str(folder))[:2]
    return model, tokenizer


def text_of(tokenizer: Any, length: int) -> str:
    """A text of so many tokens, which begins as that of no other length does."""
    whole = TEXT.read_text()
    start = whole[5 * LENGTHS.index(length) :]
    text = f"{length}. {start}"
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(text[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    found = text[:low]
    assert len(tokenizer.encode(found)) == length
    return found


def alone(model: Any, tokenizer: Any, ids: Sequence[int], count: int, **how: Any) -> list[Said]:
    """What mlx-lm answers without any cache."""
    from mlx_lm import stream_generate

    found = []
    for reply in stream_generate(model, tokenizer, list(ids), max_tokens=count, **how):
        logprobs = np.array(reply.logprobs.tolist())
        best = np.sort(logprobs)[-2:]
        token = int(reply.token)
        found.append(Said(token, float(best[1] - best[0]), float(logprobs[token])))
    return found


def same_tokens(tokens: Sequence[int], expected: Sequence[Said], near: float = NEAR) -> None:
    """Equal, or the model could hardly tell the two apart where they differ at first."""
    for at, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)):
        if ours != theirs.token:
            assert theirs.ahead < near, (at, list(tokens), [one.token for one in expected])
            print(f"token {at} differs: the next best is {theirs.ahead:.2g} behind")
            return
    assert len(tokens) == len(expected)
