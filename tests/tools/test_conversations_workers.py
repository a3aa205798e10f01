"""conversations on other servers: of several workers, and those that keep no lineages.

Every model's lineages live on one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.cache.lineage.client import connect
from pion_vllm_mlx.cache.store_client_routes import usual_worker
from pion_vllm_mlx.tools.lineage_access import Shelf
from tests.cache.lineage.driving import Engine, open_store, prompt, url_of
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model
from tests.tools.commands import command

WORKERS = 3
TENANTS = ("a", "b", "c", "d", "e", "f")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("workers") / "data"
    folder.mkdir(mode=0o700)
    flags = ("-w", str(WORKERS), "--independent-workers")
    running = RunningServer(free_port_block(2 + WORKERS), folder, flags).start()
    yield running
    running.stop()


def test_every_workers_conversations_are_listed_explained_and_changed(
    server: RunningServer,
) -> None:
    model, ids = tiny_model("llama"), prompt(80, 1)
    for tenant in TENANTS:
        store = open_store(model, server, key_parts={"tenant": tenant})
        assert Engine(model, store).turn(ids, reply=1).reused == 0
        assert store.flush(60), store.stats()
        store.close()
    client = connect(LineageOptions(url=url_of(server)))
    found = Shelf(client).all()
    homes = {usual_worker(f"pps{one.id.partition(':')[0]}s1", WORKERS) for one in found}
    assert len(homes) > 1, "all of them live on one worker: choose other tenants"
    assert sorted(one.tenant for one in found) == sorted(TENANTS)
    assert [one.tenant for one in found] == list(reversed(TENANTS))  # the latest used first
    client.close()
    other = open_store(model, server)
    told = other.explain(ids)
    other.close()
    assert (told.common, told.key_field) == (79, "tenant")
    names = [one.id for one in found]
    assert command("conversations", "pin", *names, "--url", url_of(server)).code == 0
    listed = command("conversations", "--json", "--url", url_of(server)).json
    assert [one["pinned"] for one in listed] == [True] * len(TENANTS)
    gone = command("conversations", "delete", *names, "--url", url_of(server))
    assert gone.code == 0, gone.err
    assert command("conversations", "--json", "--url", url_of(server)).json == []


def test_a_server_that_cannot_keep_conversations_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    flags = ("--ns-prefix", "app:")
    server = RunningServer(free_port_block(), tmp_path / "data", flags).start()
    try:
        listed = command("conversations", "--url", url_of(server))
        assert listed.code == 1 and "without --ns-prefix" in listed.err
        model = tiny_model("llama")
        store = open_store(model, server)
        turn = Engine(model, store).turn(prompt(80, 1), reply=2)
        assert store.flush(60) and "without --ns-prefix" in turn.match.why
        store.close()
    finally:
        server.stop()
