"""Clients that log in as a tenant: their own prefixes hit, those of others are not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.attention_client import PionAttentionClient
from pion_vllm_mlx.cache.lmcache import LMCacheRemoteBackend
from pion_vllm_mlx.cache.pion_store import PionStore
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.resp_client import RespClient
from tests.cache.continuing import continued, unstored
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids
from tests.server.wire import Wire

IDS = token_ids(70)
PATIENT = 20.0


@pytest.fixture(autouse=True)
def nothing_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    monkeypatch.delenv("PION_REQUIREPASS", raising=False)
    inproc.PROCESS.forget()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tenants") / "data"
    folder.mkdir(mode=0o700)
    flags = ("--requirepass", "pw", "--tenant", "a=pa", "--tenant", "b=pb")
    one = RunningServer(free_port_block(), folder, (*flags, "--unixsocket", f"{folder}.s"))
    yield one.start()
    one.stop()


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def client(server: RunningServer, model: Any, user: str, how: str = "tcp") -> PionPromptCache:
    password = f"p{user}" if user in "ab" else "pw"
    rest: dict[str, Any] = {"password": password, "deadline_seconds": PATIENT}
    if how == "argument":
        return PionPromptCache(model, port=server.port, username=user, **rest)
    place = f"/{server.dir}.s" if how == "unix" else f"127.0.0.1:{server.port}"
    return PionPromptCache(model, url=f"{how}://{user}@{place}", **rest)


@pytest.mark.parametrize("how", ["tcp", "unix", "argument"])
def test_a_tenant_s_prefix_hits_for_it_and_for_nobody_else(
    server: RunningServer, model: Any, how: str
) -> None:
    wanted = continued(model, unstored(model, IDS))
    name = f"{how}-{model.args.model_type}"
    with client(server, model, "a", how) as writer:
        assert continued(model, writer.get_or_prefill(IDS, name)) == wanted
        assert writer.stats()["bytes_stored"] > 0 and not writer.stats()["store_failures"]
    with client(server, model, "a", how) as reader:
        assert continued(model, reader.get_or_prefill(IDS, name)) == wanted
        stats = reader.stats()
    assert (stats["hits"], stats["last_lane"]) == (1, "stored")  # files are told to no tenant
    assert not stats["unavailable"] and not stats["lane_failures"]
    with client(server, model, "b", how) as other:
        assert not other.lookup(name)
    with client(server, model, "default", how) as admin:
        assert admin.lookup(f"a:{name}") and not admin.lookup(name)


def test_a_tenant_with_another_s_password_gets_its_prefill_and_is_told(
    server: RunningServer,
) -> None:
    model = tiny_model("llama")
    wanted = continued(model, unstored(model, IDS))
    url = f"tcp://a@127.0.0.1:{server.port}"
    with PionPromptCache(model, url=url, password="pb", deadline_seconds=PATIENT) as pion:
        assert continued(model, pion.get_or_prefill(IDS, "refused")) == wanted
        assert "WRONGPASS" in str(pion.last_miss_reason)


def test_attention_at_the_server_is_a_tenant_s_own(server: RunningServer) -> None:
    rows = np.random.default_rng(1).standard_normal((2, 8, 32)).astype(np.float32)
    with client(server, None, "a") as mine, client(server, None, "b") as other:
        mine.attend_store_layer("n", 0, rows, rows)
        out = mine.attend_query("n", 0, rows[:, 0], top_k=8)
        assert out.shape == (2, 32)
        with pytest.raises(Exception, match="session not found"):
            other.attend_query("n", 0, rows[:, 0], top_k=8)
    with Wire.tcp(server.port) as wire:
        wire.ok("AUTH", "pw")
        assert wire.ask("ATTEND.PREFIX.LOOKUP", "a:n_attn", 0) == "HIT"


def test_the_small_clients_log_in_as_a_tenant(server: RunningServer) -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    def login(user: str) -> RespClient:
        return RespClient(port=server.port, password=f"p{user}", username=user)

    with PionStore(port=server.port, vquant="fp32", client=login("a")) as store:
        store.store_prefix("small", rows, -rows)
        assert np.array_equal(store.fetch_prefix("small", 2, 3, 4)[1], -rows)
    with PionStore(port=server.port, client=login("b")) as store:
        assert not store.lookup("small")
    backend = LMCacheRemoteBackend(client=login("a"))
    assert backend.put("chunk", b"x") and backend.get("chunk") == b"x"
    backend.close()
    with PionAttentionClient(client=login("a")) as index:
        assert index.create_session("index", 4, 4) >= 0
    with Wire.tcp(server.port) as wire:
        wire.ok("AUTH", "pw")
        assert wire.ask("GET", "a::chunk") == b"x"


def test_a_tool_asks_as_the_tenant_that_its_url_names(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("AUTH", "pw")
        wire.ok("KV.PREFIX.REGISTER", "a:told", 4, "fp16")
    for user, said in (("a", "registered"), ("b", "never registered here")):
        monkeypatch.setenv("PION_REQUIREPASS", f"p{user}")
        url = f"tcp://{user}@127.0.0.1:{server.port}"
        assert cli.main(["explain", "told", "--url", url]) == 1
        assert f"told: {said}" in capsys.readouterr().out.replace("lookup is a miss: ", "")
