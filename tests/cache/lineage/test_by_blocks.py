"""Where the server cannot say what the longest prefix is, its blocks lead to it all the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.lineage.driving import KINDS, Oracle, Pair, kind_options, open_store, prompt
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model


@pytest.fixture
def older(tmp_path: Path) -> Iterator[RunningServer]:
    """A server without KV.PREFIX.LONGEST and KV.PREFIX.EXPLAIN."""
    (tmp_path / "data").mkdir(mode=0o700)
    module = "tests.cache.lineage.older_server"
    server = RunningServer(free_port_block(), tmp_path / "data", module=module)
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_cannot_say_the_longest_prefix_serves_it(
    older: RunningServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, kv_bits = KINDS[kind]
    model, oracle = tiny_model(name), Oracle(kind)
    first, short, other = prompt(300, 1), prompt(40, 2), prompt(300, 5)
    caplog.set_level(logging.WARNING)
    store = open_store(model, older, **kind_options(kv_bits))
    pair = Pair(kind, store, model, oracle)
    answered = pair.ask(first)
    pair.ask(other)
    pair.ask(short)  # has no whole block: found by its first tokens
    turn = [*first, *answered.reply, *prompt(10, 3)]
    assert pair.ask(turn).reused >= 299
    store.close()
    again = open_store(model, older, **kind_options(kv_bits))
    pair = Pair(kind, again, model, oracle)
    assert pair.ask([*turn, *prompt(9, 4)]).reused >= len(turn) - 1
    assert pair.ask(short).reused == 39
    for parted in (290, 128, 70):  # within a block, at its edge, within the next
        pair.ask([*other[:parted], *prompt(60, parted)])
    again.close()
    told = [one for one in caplog.messages if "KV.PREFIX.LONGEST" in one]
    assert told and len(told) <= 4  # once for each connection
