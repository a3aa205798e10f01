"""Every family on a real engine: same tokens as without a cache, and only the rest computed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import REPLY_TOKENS, Reply, running_engine, same_reply  # noqa: E402
from tests.vllm_mlx.families import FAMILIES, RECURRENT, Turn, script  # noqa: E402

IN_PROCESS = BackendSettings(options=None)


def stored_at(server: RunningServer, **options: Any) -> BackendSettings:
    """Settings of a backend whose store is ``server``."""
    return BackendSettings(LineageOptions(url=f"tcp://127.0.0.1:{server.port}", **options))


def reference(family: str) -> tuple[list[Turn], list[Reply]]:
    """The script of a family and the replies of a run that has no prefix cache."""
    with running_engine(FAMILIES[family], enable_prefix_cache=False) as engine:
        turns = script(lambda prompt: engine.ask(prompt).tokens, family)
        return turns, [engine.computed(turn.prompt)[0] for turn in turns]


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_new_is_computed_and_the_reply_is_that_of_no_cache(family: str) -> None:
    turns, replies = reference(family)
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES[family]) as engine:
        for turn, expected in zip(turns, replies, strict=True):
            reply, computed = engine.computed(turn.prompt)
            assert reply.cached == turn.reuse, (turn.what, reply.lookup)
            assert computed == len(turn.prompt) - turn.reuse, turn.what
            same_reply(reply, expected)


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
        replies, computed = engine.computed_all(prompts)
        assert [reply.cached for reply in replies] == [len(shared)] * 8
        assert [reply.tokens for reply in replies] == expected
        rests = [len(prompt) - len(shared) for prompt in prompts]
        assert sum(rests) <= computed <= len(rests) * max(rests)
        again, computed = engine.computed_all(prompts)
        assert [reply.cached for reply in again] == [len(prompt) - 1 for prompt in prompts]
        assert [reply.tokens for reply in again] == expected
        assert computed == len(prompts)


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", RECURRENT)
def test_prompts_of_different_lengths_at_once_get_the_reply_of_a_client_alone(family: str) -> None:
    prompts = [token_ids(40 + 83 * index, seed=90 + index) for index in range(6)]
    install_vllm_mlx_backend(settings=IN_PROCESS)
    with running_engine(FAMILIES[family]) as engine:
        at_once = engine.ask_all(prompts)
    assert [reply.cached for reply in at_once] == [0] * 6
    for prompt, reply in zip(prompts, at_once, strict=True):  # one a time, as a new engine does
        with running_engine(FAMILIES[family]) as engine:
            assert engine.ask(prompt).tokens == reply.tokens


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_engine_computes_only_what_no_engine_before_it_has_stored(
    family: str, pion_server: RunningServer
) -> None:
    turns, replies = reference(family)
    install_vllm_mlx_backend(settings=stored_at(pion_server))
    for turn, expected in zip(turns, replies, strict=True):
        with running_engine(FAMILIES[family]) as engine:
            reply, computed = engine.computed(turn.prompt)
            assert engine.cache.save_to_disk("")
        assert reply.cached == turn.stored, (turn.what, reply.lookup)
        assert computed == len(turn.prompt) - turn.stored, turn.what
        same_reply(reply, expected)
        assert (reply.lookup.tier in ("mapped", "stored")) == (turn.stored > 0)


@pytest.mark.usefixtures("uninstalled")
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_clients_of_a_new_engine_all_hit_what_an_old_one_has_stored(
    family: str, pion_server: RunningServer
) -> None:
    prompts = [token_ids(60 + 9 * index, seed=60 + index) for index in range(8)]
    install_vllm_mlx_backend(settings=stored_at(pion_server))
    with running_engine(FAMILIES[family]) as engine:
        expected = [engine.ask(prompt).tokens for prompt in prompts]
        assert engine.cache.save_to_disk("")
    with running_engine(FAMILIES[family]) as engine:
        replies, computed = engine.computed_all(prompts)
    assert [reply.cached for reply in replies] == [len(prompt) - 1 for prompt in prompts]
    assert [reply.tokens for reply in replies] == expected
    assert computed == len(prompts)


@pytest.mark.usefixtures("uninstalled")
def test_another_model_of_the_same_shape_or_another_tenant_never_shares(
    pion_server: RunningServer,
) -> None:
    prompt = token_ids(200)
    install_vllm_mlx_backend(settings=stored_at(pion_server, key_parts={"tenant": "a"}))
    with running_engine(FAMILIES["plain"]) as engine:
        engine.ask(prompt)
        assert engine.cache.save_to_disk("")
    with running_engine(other_weights, enable_prefix_cache=False) as engine:
        expected = engine.ask(prompt).tokens
    with running_engine(other_weights) as engine:
        reply, computed = engine.computed(prompt)
        assert (reply.tokens, reply.cached, computed) == (expected, 0, 200)
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.computed(prompt)[1] == 1  # the same model, and the same tenant
    uninstall_vllm_mlx_backend()
    install_vllm_mlx_backend(settings=stored_at(pion_server, key_parts={"tenant": "b"}))
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.computed(prompt)[1] == 200


def other_weights() -> Any:
    """A model like the plain one in everything but one weight."""
    model = FAMILIES["plain"]()
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight[0, 0] = weight[0, 0] + 1
    return model


@pytest.mark.usefixtures("uninstalled")
def test_a_store_that_dies_or_is_absent_costs_the_prefill_and_no_request(
    pion_server: RunningServer,
) -> None:
    first, second = token_ids(200), token_ids(220, seed=4)
    with running_engine(FAMILIES["plain"], enable_prefix_cache=False) as engine:
        expected = [engine.ask(first).tokens, engine.ask(second).tokens]
    install_vllm_mlx_backend(settings=stored_at(pion_server, deadline_seconds=0.5))
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.ask(first).tokens == expected[0]
        pion_server.kill()
        reply, computed = engine.computed(second)
        assert (reply.tokens, computed) == (expected[1], 220)
        reply, computed = engine.computed(first)  # of the in-process tier
        assert (reply.tokens, computed) == (expected[0], 1)
    with running_engine(FAMILIES["plain"]) as engine:
        assert [engine.ask(first).tokens, engine.ask(second).tokens] == expected


@pytest.mark.usefixtures("uninstalled")
def test_a_stored_entry_is_not_changed_by_those_who_borrow_it() -> None:
    prompt = token_ids(90)
    for family in ("plain", "sliding window", "gated delta"):
        uninstall_vllm_mlx_backend()
        install_vllm_mlx_backend(settings=IN_PROCESS)
        with running_engine(FAMILIES[family]) as engine:
            first, computed = engine.computed(prompt)
            assert computed == len(prompt)
            others = [token for token in range(9) if token != first.tokens[0]][:6]
            borrowed, computed = engine.computed_all([[*prompt, *[one] * 9] for one in others])
            held = len(prompt) - (family != "plain")  # a reply's cache can be cut, or not
            assert [reply.cached for reply in borrowed] == [held] * len(others)
            assert computed == len(others) * (len(prompt) + 9 - held)
            for _ in range(3):
                again, computed = engine.computed(prompt)
                assert (again.tokens, again.cached, computed) == (first.tokens, 89, 1)


@pytest.mark.usefixtures("uninstalled")
def test_quantized_entries_and_a_bound_on_the_cache_change_no_token(
    pion_server: RunningServer,
) -> None:
    """--kv-cache-quantization is lossy in stock vllm-mlx; here entries keep their own dtype."""
    prompt = token_ids(300)
    for flags in ({"kv_cache_quantization": True}, {"max_kv_size": 64}):
        uninstall_vllm_mlx_backend()
        with running_engine(FAMILIES["plain"], enable_prefix_cache=False, **flags) as engine:
            expected = engine.ask(prompt).tokens
        install_vllm_mlx_backend(settings=stored_at(pion_server))
        with running_engine(FAMILIES["plain"]) as engine:
            engine.ask(prompt)  # what an engine without the flags has stored is no obstacle
            assert engine.cache.save_to_disk("")
        with running_engine(FAMILIES["plain"], **flags) as engine:
            assert engine.ask(prompt).tokens == expected
            reply, computed = engine.computed(prompt)
            assert (reply.tokens, computed) == (expected, 1)


@pytest.mark.usefixtures("uninstalled")
def test_a_long_prefill_is_kept_on_its_way() -> None:
    """Where stock vllm-mlx on mlx-lm 0.31 keeps nothing until the end: a client that leaves."""
    prompt = token_ids(500)
    install_vllm_mlx_backend(settings=IN_PROCESS)
    steps = {"prefill_step_size": 64, "mid_prefill_save_interval": 128}
    for family in ("plain", "gated delta"):
        with running_engine(FAMILIES[family], **steps) as engine:
            engine.ask_and_leave(prompt, after_tokens=300)
            reply, computed = engine.computed(prompt)
            assert 0 < computed <= 500 - 128
            assert reply.cached == 500 - computed


def test_stock_vllm_mlx_prefills_an_exact_repeat_again() -> None:
    """The fault that the backend mends, beside the first test of this file."""
    prompt = token_ids(200)
    with running_engine(FAMILIES["plain"]) as engine:
        assert engine.computed(prompt)[1] == 200
        reply, computed = engine.computed(prompt)
        assert computed == 200
        assert len(reply.tokens) == REPLY_TOKENS
