"""Prefixes of every length on a real engine: the reply of no cache, and only the rest computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.models import WINDOW, token_ids  # noqa: E402
from tests.vllm_mlx.engines import Engine, Reply, running_engine, same_reply  # noqa: E402
from tests.vllm_mlx.families import FAMILIES, RECURRENT, SLICEABLE  # noqa: E402

#: around what a store is asked for at least and a window (16), and blocks of 64 tokens
EDGES = (1, 2, 15, 16, 17, 18, 33, 63, 64, 65, 66, 128, 131)
MIN_GAIN = LineageOptions().min_gain
MORE = 9


def prompt_of(length: int) -> list[int]:
    """A prompt that begins as no other of the 128 before it, nor behind it."""
    return [length % 128, length // 128, *token_ids(max(0, length - 2), seed=length)][:length]


def extended(prompt: list[int], reply: Sequence[int]) -> list[int]:
    """The prompt and what its reply did not begin with."""
    return [*prompt, (reply[0] + 1) % 128, *token_ids(MORE - 1, seed=len(prompt))]


def stored(tokens: int) -> int:
    """What a new engine has of so many tokens in the store: it asks for no fewer."""
    return tokens if tokens >= MIN_GAIN else 0


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_any_length_is_reused_up_to_its_last_token_and_extended(
    family: str, pion_server: RunningServer, long_run: bool
) -> None:
    pion_server.restart("--max-sessions", "1024")  # two a prompt, and more where it is extended
    url = f"tcp://127.0.0.1:{pion_server.port}"
    for lengths in (range(1, 129), range(129, 201)) if long_run else (EDGES,):
        prove(family, lengths, BackendSettings(LineageOptions(url=url)))


def prove(family: str, lengths: Sequence[int], settings: BackendSettings) -> None:
    """Asks without a cache, with one, and a new engine that knows what the store has."""
    uninstall_vllm_mlx_backend()
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as engine:
        replies = {length: engine.computed(prompt_of(length))[0] for length in lengths}
        longer = {length: extended(prompt_of(length), replies[length].tokens) for length in lengths}
        expected = {length: engine.computed(longer[length])[0] for length in lengths}
    install_vllm_mlx_backend(settings=settings)
    with running_engine(FAMILIES[family]) as engine:
        for length in lengths:
            asked(engine, prompt_of(length), replies[length], 0)
            asked(engine, prompt_of(length), replies[length], length - 1)
        assert engine.cache.save_to_disk("")
    with running_engine(FAMILIES[family]) as engine:
        for length in lengths:
            # a prompt is kept one token shorter; rows of a window are there from that one on
            known = length - (family in RECURRENT) if stored(length - 1) else 0
            known = stored(length) if family in SLICEABLE else known
            asked(engine, longer[length], expected[length], known)
            # a ring can be cut until it is full
            is_short = family == "sliding window" and length + MORE - 1 < WINDOW
            is_cut = family in SLICEABLE or is_short
            kept = length - 1 if is_cut else stored(length - 1)
            asked(engine, prompt_of(length), replies[length], kept)


def asked(engine: Engine, prompt: list[int], reply: Reply, reused: int) -> None:
    """Asks for a prompt of which so many tokens are reused, and no others computed."""
    told, computed = engine.computed(prompt)
    assert (told.cached, computed) == (reused, len(prompt) - reused), told.lookup
    same_reply(told, reply)
