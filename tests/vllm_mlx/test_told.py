"""What is told of a request: why it was not a longer hit, and as things were at that moment."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend_tally import Tally  # noqa: E402
from tests.conftest import RunningServer  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import Engine, running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")


def installed(server: RunningServer | None, **options: Any) -> None:
    """A backend whose store is ``server``; None: one where nothing listens."""
    url = f"tcp://127.0.0.1:{1 if server is None else server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, **options)))


def why(engine: Engine, prompt: list[int]) -> str:
    """What is said of a prompt, and what it reused."""
    reply = engine.ask(prompt)
    assert reply.lookup.reused_tokens == reply.cached
    return f"{reply.cached}: {reply.lookup.why}"


def test_why_is_about_what_was_reused_not_about_the_store_alone(
    pion_server: RunningServer,
) -> None:
    installed(pion_server, queue_bytes=1)  # next to nothing reaches the store
    start = token_ids(100, 5)
    with running_engine(FAMILIES["plain"]) as engine:
        assert why(engine, start) == "0: nothing is stored that begins like this prompt"
        assert why(engine, start) == "99: "
        longer = [*start[:90], *token_ids(50, 6)]
        assert why(engine, longer) == "90: the prompt leaves what is kept at token 90"
        assert why(engine, [*start[:80], *token_ids(9, 8)]) == (
            "80: memory has 80 tokens, and the store is not asked for 8 more: fewer than "
            "--pion-min-gain"
        )
    with running_engine(FAMILIES["mamba"]) as engine:
        engine.ask(start)
        said = why(engine, [*start[:60], *token_ids(50, 6)])
        assert said in (  # the first of all may have reached the store after all
            "0: 60 tokens agree, but nothing is kept with which to go on between",
            "0: no recurrent state is stored at or before the tokens in common",
        )


def test_what_the_least_gain_left_in_the_store_is_said_to_have_been_too_little(
    pion_server: RunningServer,
) -> None:
    installed(pion_server)
    start = token_ids(100, 5)
    with running_engine(FAMILIES["plain"]) as engine:
        engine.ask(start)
        assert engine.cache.save_to_disk("")
        engine.cache.clear()
        engine.ask(start[:88])
        longer = [*start, *token_ids(50, 7)]
        assert why(engine, longer) == (
            "88: the store has 100 tokens, 12 more: fewer than --pion-min-gain"
        )
        assert why(engine, token_ids(10, 9)) == (
            "0: 9 tokens could be reused, and --pion-min-gain is 16"
        )


def test_what_the_budget_had_no_room_for_is_said_to_have_had_none(
    pion_server: RunningServer,
) -> None:
    installed(pion_server, budget_bytes=1000)
    prompt = token_ids(100, 8)
    with running_engine(FAMILIES["plain"]) as engine:
        engine.ask(prompt)
        assert engine.cache.save_to_disk("")
        engine.cache.clear()
        assert " the budget is 1,000 bytes" in why(engine, prompt)


def test_a_store_that_has_gone_is_named_whatever_memory_gave() -> None:
    installed(None)
    prompt = token_ids(100, 10)
    with running_engine(FAMILIES["plain"]) as engine:
        engine.ask(prompt)
        assert why(engine, [*prompt, *token_ids(50, 11)]).split(" ", 1)[1].startswith("no store: ")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_miss_is_explained_by_what_there_was_then(
    pion_server: RunningServer, restarted: bool
) -> None:
    """From memory, and from the store; meanwhile the missed prompt is stored itself."""
    installed(pion_server)
    start = token_ids(100, 12)
    asked = [*start, 5, 8, 9, 1]
    with running_engine(FAMILIES["plain"]) as engine:
        engine.ask([*start, 7, 8, 9, 1])
        assert engine.cache.save_to_disk("")
        if not restarted:
            engine.ask(asked)
            check_explained(engine, asked)
    if restarted:
        with running_engine(FAMILIES["plain"]) as engine:
            engine.ask(asked)
            check_explained(engine, asked)


def check_explained(engine: Engine, asked: list[int]) -> None:
    """What is told of ``asked``, the last miss, once it is stored itself."""
    assert engine.cache.save_to_disk("")
    miss, store = engine.cache.last_miss, engine.cache.store_or_none()
    assert miss.missed.ids.tolist() == asked
    told = engine.worker.submit(miss.missed.explained, store).result()
    assert (told.common, told.restorable, told.position) == (100, 100, 100)
    assert (told.stored_token, told.asked_token) == (7, 5)
    now = engine.worker.submit(store.explain, asked).result()
    assert now.restorable == len(asked) - 1


def test_nothing_saved_has_no_sign() -> None:
    told = Tally(9, 0, (Lookup(token_ids_of(9), restore_ms=1e-5),), 100.0).receipt()
    assert str(told["saved_ms"]) == "0.0"


def token_ids_of(count: int) -> Any:
    from pion_vllm_mlx.cache.completion import token_ids as as_array

    return as_array(token_ids(count))
