"""Two engines alive on one store: what one has stored is the other's, too, and both may write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import RunningServer
from tests.serve.engines import Engine, Reply, running_engine
from tests.serve.served import Served, family_folder, store_of

pytest.importorskip("mlx_lm")

TEXT = "A quick brown fox jumps over a lazy dog and naps. " * 11


@contextlib.contextmanager
def two_engines(
    folder: Path, family: str, server: RunningServer
) -> Iterator[tuple[Served, Served]]:
    """Two engines of one model; the second reads as if it were on another machine."""
    from mlx_lm import load

    model, flags = family_folder(folder, family)
    found = load(str(model))[:2]
    with contextlib.ExitStack() as running:
        served = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            with pytest.MonkeyPatch.context() as patch:
                if name == "two":
                    patch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
                store = store_of(server)
                engine = running_engine(folder / name, model, *store, flags=flags)
                served.append(Served(running.enter_context(engine), *found))
        yield served[0], served[1]


def ask_all(served: Served, texts: list[str]) -> list[Reply]:
    """One request behind the other, proved."""
    return [served.complete(text) for text in texts]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "mamba"])
def test_two_engines_alive_on_one_store_compute_once_what_either_has_stored(
    tmp_path: Path, pion_server: RunningServer, family: str
) -> None:
    with two_engines(tmp_path, family, pion_server) as (one, two):
        assert one.complete(TEXT).cached == 0
        one.engine.until_stored()
        found = two.complete(TEXT)
        assert (found.cached, found.receipt["tier"]) == (found.prompt - 1, "stored")
        longer = TEXT + "And so on, he said, and went to sleep until the moon was up. " * 3
        assert two.complete(longer).cached >= len(TEXT) - 1
        two.engine.until_stored()
        back = one.complete(longer + "More.")
        assert back.cached >= len(longer) - 1 and back.receipt["tier"] in ("mapped", "stored")
        assert_both_may_write(one, two)


def assert_both_may_write(one: Served, two: Served) -> None:
    """At once, what branches off the same prompt and what does not; each then has the other's."""
    texts = [
        [f"{TEXT}{name} says {number}. " + "So be it. " * 4 for number in range(3)]
        + [f"{name} alone. {TEXT}"]
        for name in ("One", "Two")
    ]
    with ThreadPoolExecutor(2) as pool:
        asked = pool.map(ask_all, (one, two), texts)
        assert all(reply.cached >= len(TEXT) - 1 for replies in asked for reply in replies[:3])
    for served in (one, two):
        until_stored(served.engine)
    for served, others in ((one, texts[1]), (two, texts[0])):
        for reply in ask_all(served, others):
            assert reply.cached == reply.prompt - 1, reply.receipt
            assert reply.receipt["tier"] in ("mapped", "stored")
        assert served.engine.stats().get("damaged", 0) == 0


def until_stored(engine: Engine) -> None:
    stats = engine.until_stored()
    assert not stats.get("failed"), stats
