"""Stored conversations attended at the server: right, proved, and what is common once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import pion_vllm_mlx
from pion_vllm_mlx.cache.lineage import AttendedConversations, AttendedPrefix, LineageOptions
from pion_vllm_mlx.errors import StoreUnavailable, UnsupportedCache
from tests.cache.lineage.driving import Engine, open_store, url_of
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids
from tests.patch.conftest import SUFFIX, alone, forwards, furthest
from tests.server.attention.asking import connected

pytestmark = pytest.mark.usefixtures("patched")

SYSTEM = token_ids(200, seed=1)
FIRST = [*SYSTEM, *token_ids(90, seed=2)]
SECOND = [*SYSTEM, *token_ids(70, seed=3)]

Attend = Callable[..., AttendedConversations]


@pytest.fixture(params=["binary", "resp"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_BINARY", "1" if request.param == "resp" else "")
    return str(request.param)


@pytest.fixture
def attend(pion_server: RunningServer) -> Iterator[Attend]:
    """Opens conversations of the test's server, and closes them."""
    opened: list[AttendedConversations] = []

    def one(model: Any, **options: Any) -> AttendedConversations:
        made = AttendedConversations(model, LineageOptions(url=url_of(pion_server), **options))
        opened.append(made)
        return made

    yield one
    for made in opened:
        made.close()


def keep(model: Any, server: RunningServer, *prompts: list[int], **options: Any) -> None:
    """Stores conversations as an engine does; each is its prompt less the last token, and more."""
    store = open_store(model, server, **options)
    for ids in prompts:
        Engine(model, store).turn(ids, reply=1)
        assert store.flush()
    store.close()


def found(conversations: AttendedConversations, ids: list[int]) -> AttendedPrefix:
    prefix = conversations.find([*ids, 0])
    assert prefix is not None
    return prefix


def opened(model: Any, prefix: AttendedPrefix) -> list[Any]:
    cache: list[Any] = pion_vllm_mlx.make_pion_prompt_cache(
        model, prefix.namespace, prefix, prefix.length
    )
    return cache


def resident(server: RunningServer) -> dict[str, int]:
    with connected(server) as asking:
        return asking.info()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_conversations_with_a_common_beginning_are_attended_as_computed(
    pion_server: RunningServer, attend: Attend, lane: str, family: str
) -> None:
    model = tiny_model(family)
    keep(model, pion_server, FIRST, SECOND)
    conversations = attend(model)
    caches = []
    for ids in (FIRST, SECOND):
        prefix = found(conversations, ids)
        assert prefix.length == len(ids) - 1
        cache = opened(model, prefix)
        caches.append(cache)
        assert cache[0].lane == lane
        assert furthest(forwards(model, cache, 3), alone(model, ids[:-1], 3)) < 1e-4
    # a third turn of the first, after the second came to share its blocks
    mx.eval(model(mx.array([SUFFIX]), cache=caches[0]))
    seen = resident(pion_server)
    assert seen["sdpa_demotions"] == 0
    if family == "llama":
        heads, dim = 2, 32
        # 289 and 269 tokens, of which the first 200 are the same
        assert seen["sdpa_bytes"] == 2 * (5 + 5 - 3) * 64 * 2 * heads * dim * 4
    assert conversations.attention.queries[lane] > 0


def test_a_part_of_a_conversation_is_attended_as_far_as_it_agrees(
    pion_server: RunningServer, attend: Attend
) -> None:
    model = tiny_model("llama")
    keep(model, pion_server, FIRST)
    prefix = found(attend(model), SYSTEM)
    assert prefix.length == len(SYSTEM)
    assert furthest(forwards(model, opened(model, prefix), 2), alone(model, SYSTEM, 2)) < 1e-4
    assert attend(model).find(token_ids(200, seed=77)) is None
    assert attend(tiny_model("llama", intermediate_size=96)).find(FIRST) is None


def test_a_conversation_that_grows_meanwhile_is_the_same_beginning(
    pion_server: RunningServer, attend: Attend
) -> None:
    model = tiny_model("llama")
    keep(model, pion_server, FIRST, SECOND)
    prefix = found(attend(model), SECOND)
    cache = opened(model, prefix)  # proved, and not yet warm
    longer = [*SECOND, *token_ids(80, seed=4)]
    keep(model, pion_server, longer)
    assert furthest(forwards(model, cache, 2), alone(model, SECOND[:-1], 2)) < 1e-4


def test_slots_that_are_cold_or_gone_come_back(pion_server: RunningServer, attend: Attend) -> None:
    model = tiny_model("llama")
    keep(model, pion_server, FIRST, SECOND)
    conversations = attend(model)
    cache = opened(model, found(conversations, SECOND))
    other = opened(model, found(conversations, FIRST))
    wanted = alone(model, SECOND[:-1], 2)
    assert furthest(forwards(model, other, 2), alone(model, FIRST[:-1], 2)) < 1e-4
    filler = np.zeros((1, 1, 32), "<f4")
    with connected(pion_server, "filling") as asking:
        for layer in range(256):
            asking.at(layer=layer).store(filler, filler)
    assert furthest(forwards(model, cache, 2), wanted) < 1e-4
    pion_server.restart()
    again = opened(model, found(conversations, SECOND))
    assert furthest(forwards(model, again, 2), wanted) < 1e-4


def test_another_conversation_in_its_place_is_never_attended(
    pion_server: RunningServer, attend: Attend
) -> None:
    model = tiny_model("llama")
    keep(model, pion_server, FIRST, SECOND)
    prefix = found(attend(model), SECOND)
    cache = opened(model, prefix)
    # all is deleted, and others get the numbers of its segments
    with connected(pion_server) as asking:
        keys = asking.wire.ask("KEYS", "pps:*")
        names = [prefix.namespace[: prefix.namespace.rindex("s") + 1] + str(n) for n in (1, 2, 3)]
        asking.wire.ask("KV.PREFIX.DROP", *names)
        asking.wire.ask("DEL", *keys)
    stranger = token_ids(200, seed=50)
    keep(model, pion_server, [*stranger, *FIRST[200:]], [*stranger, *SECOND[200:]])
    with pytest.raises(StoreUnavailable, match="replaced|gone"):
        forwards(model, cache, 1)
    assert resident(pion_server)["sdpa_warm"] == 0
    with pytest.raises(ValueError, match="differs|gone|other tokens"):
        opened(model, prefix)


def test_what_cannot_be_attended_is_refused(pion_server: RunningServer, attend: Attend) -> None:
    with pytest.raises(UnsupportedCache):
        attend(tiny_model("qwen3_next"))
    with pytest.raises(UnsupportedCache):
        attend(tiny_model("llama"), kv_bits=8)
    model = tiny_model("llama")
    keep(model, pion_server, FIRST)
    prefix = found(attend(model), FIRST)
    with pytest.raises(ValueError, match="tokens are meant"):
        pion_vllm_mlx.make_pion_prompt_cache(model, prefix.namespace, prefix, prefix.length - 1)
    with pytest.raises(ValueError, match="nothing to attend to"):
        pion_vllm_mlx.make_pion_prompt_cache(model, "another", prefix, prefix.length)
    with pytest.raises(ValueError, match="another model"):
        pion_vllm_mlx.make_pion_prompt_cache(
            tiny_model("llama"), prefix.namespace, prefix, prefix.length
        )
