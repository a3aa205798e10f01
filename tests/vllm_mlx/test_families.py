"""Every family on a real engine: same tokens as without a cache, and only the rest computed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import REPLY_TOKENS, running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES, SLICEABLE, Turn, script  # noqa: E402

IN_PROCESS = BackendSettings(options=None)


def reference(family: str) -> tuple[list[Turn], list[list[int]]]:
    """The script of a family and the replies of a run that has no prefix cache."""
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as engine:
        turns = script(lambda prompt: engine.ask(prompt).tokens, family in SLICEABLE)
        return turns, [engine.ask(turn.prompt).tokens for turn in turns]


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_new_is_computed_and_the_reply_is_that_of_no_cache(family: str) -> None:
    turns, replies = reference(family)
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES[family]) as engine:
        for turn, expected in zip(turns, replies, strict=True):
            reply, computed = engine.computed(turn.prompt)
            assert reply.tokens == expected, turn.what
            assert reply.cached == turn.reuse, (turn.what, reply.lookup)
            assert computed == len(turn.prompt) - turn.reuse, turn.what


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_interleaved_conversations_each_continue_behind_their_last_reply(family: str) -> None:
    histories = [token_ids(90, seed=21), token_ids(70, seed=22)]
    asked: list[tuple[list[int], list[int], int]] = []
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as plain:
        for turn in range(3):
            for index, history in enumerate(histories):
                reply = plain.ask(history).tokens
                known = 0 if turn == 0 else len(history) - 9
                asked.append((list(history), reply, known))
                histories[index] = [*history, *reply, *token_ids(9, seed=30 + turn)]
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES[family]) as engine:
        for prompt, expected, known in asked:
            reply, computed = engine.computed(prompt)
            assert reply.tokens == expected
            assert (reply.cached, computed) == (known, len(prompt) - known)


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_clients_at_once_all_hit_and_get_the_reply_of_a_client_alone(family: str) -> None:
    shared = token_ids(80, seed=41)
    prompts = [[*shared, *token_ids(5 + 7 * index, seed=50 + index)] for index in range(8)]
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as plain:
        expected = [plain.ask(prompt).tokens for prompt in prompts]
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES[family]) as engine:
        # A prompt is kept at all but its last token: here the shared part.
        engine.ask([*shared, next(t for t in range(9) if t not in {p[80] for p in prompts})])
        replies = engine.ask_all(prompts)
        assert [reply.cached for reply in replies] == [len(shared)] * 8
        assert [reply.tokens for reply in replies] == expected
        again = engine.ask_all(prompts)
        assert [reply.cached for reply in again] == [len(prompt) - 1 for prompt in prompts]
        assert [reply.tokens for reply in again] == expected


def test_stock_vllm_mlx_prefills_an_exact_repeat_again() -> None:
    """The fault that the backend mends, beside the first test of this file."""
    prompt = token_ids(200)
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.computed(prompt)[1] == 200
        reply, computed = engine.computed(prompt)
        assert computed == 200
        assert len(reply.tokens) == REPLY_TOKENS
