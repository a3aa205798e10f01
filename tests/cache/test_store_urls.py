"""A URL names one place; what cannot be reached or used is refused with what to do instead."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.resp_client import RespClient
from pion_vllm_mlx.cache.store_client_endpoint import (
    Door,
    Endpoint,
    Place,
    _Known,
    parse_url,
    what_helps,
)
from pion_vllm_mlx.config import AFFINITY_OFFSET
from pion_vllm_mlx.errors import (
    CommandError,
    ConfigError,
    PionError,
    StoreUnavailable,
    WrongPassword,
)
from tests.conftest import free_port_block


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("tcp://localhost:7", Place(Address(host="localhost", port=7))),
        ("tcp://10.0.0.1", Place(Address(host="10.0.0.1", port=1974))),
        ("unix:///run/a%20b", Place(Address(path="/run/a b"))),
        ("tcp://team@localhost:7", Place(Address(host="localhost", port=7), username="team")),
        ("unix://team@/run/s", Place(Address(path="/run/s"), username="team")),
        ("embedded:", Place(embedded=True)),
        ("embedded:///a%20b%23%3F", Place(embedded=True, folder="/a b#?")),
        ("embedded:///mit leer ü", Place(embedded=True, folder="/mit leer ü")),
    ],
)
def test_a_url_names_one_place(url: str, place: Place) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize("url", ["tcp://[::1", "tls://[x", "unix://]/a", "tcp://[v1.x]:1:2"])
def test_brackets_that_do_not_fit_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize("url", ["tcp://:secret@host:1", "tls://a:secret@h:1"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="PION_REQUIREPASS") as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["embedded:///a#b", "embedded:///a?b", "tcp://host:1?db=3"])
def test_what_would_be_cut_off_a_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="%3F and %23"):
        parse_url(url)


BAD = ["", "host:1974", "redis://host", "embedded://a/b", "tcp://h:x"]


@pytest.mark.parametrize("url", [*BAD, "tcp://@host:1", "embedded://team@/a", "unix://h/s"])
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


def test_a_user_without_a_password_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PION_REQUIREPASS", raising=False)
    with pytest.raises(ConfigError, match="team needs a password"):
        PionPromptCache(url="tcp://team@localhost:1")
    with pytest.raises(ConfigError, match="team needs a password"):
        PionPromptCache(username="team")
    with pytest.raises(ConfigError, match="team needs a password"):
        RespClient(username="team")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (WrongPassword("invalid"), "PION_REQUIREPASS"),
        (CommandError("unknown command 'KV.PREFIX.LOOKUP'"), "no pion-server"),
        (CommandError("something else"), ""),
    ],
)
def test_the_advice_fits_the_failure(error: PionError, advice: str) -> None:
    assert advice in what_helps(error)
    assert bool(advice) == bool(what_helps(error))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_where_nobody_listens_the_advice_is_to_start_a_server(kind: str, tmp_path: Path) -> None:
    absent = f"unix://{tmp_path}/none" if kind == "unix" else f"tcp://127.0.0.1:{free_port_block()}"
    endpoint = Endpoint(parse_url(absent), None, 2.0)
    with pytest.raises(PionError) as refused:
        endpoint.connection().command("PING")
    assert "pion-server --kvcache" in what_helps(refused.value)


def test_a_data_folder_that_cannot_be_made_is_no_absent_server(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below"):
        endpoint = Endpoint(parse_url(f"embedded://{tmp_path}/{folder}"), None, 2.0)
        with pytest.raises(PionError, match=folder) as refused:
            endpoint.connection()
        assert not what_helps(refused.value)
    cause = FileNotFoundError(2, "No such file or directory", "/proc/x")
    failed = StoreUnavailable("the data folder cannot be written")
    failed.__cause__ = cause
    assert not what_helps(failed)


def test_the_pair_that_mlx_lm_loads_is_not_taken_for_a_model() -> None:
    with pytest.raises(ConfigError, match="not a tuple"):
        PionPromptCache(("model", "tokenizer"))


def test_threads_that_ask_at_once_go_through_one_door_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port_block()
    endpoint = Endpoint(parse_url(f"tcp://127.0.0.1:{port}"), None, 1.0)
    endpoint._known = _Known(2, port, port + AFFINITY_OFFSET, 0)
    real, both = endpoint.connect, threading.Barrier(2, timeout=60)
    made: list[RespConnection] = []

    def connect(address: Address) -> RespConnection:
        made.append(real(address))
        both.wait()
        return made[-1]

    monkeypatch.setattr(endpoint, "connect", connect)
    doors: list[Door] = []
    threads = [threading.Thread(target=lambda: doors.append(endpoint.door_of(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and doors[0] is doors[1] is endpoint.door_of(1)
    endpoint.close()


def test_a_worker_that_moved_gets_another_door(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port_block()
    endpoint = Endpoint(parse_url(f"tcp://127.0.0.1:{port}"), None, 1.0)
    endpoint._known = _Known(2, port, port + AFFINITY_OFFSET, 0)
    before = endpoint.door_of(1)
    monkeypatch.setattr(endpoint, "_address_of", lambda worker: Address(path="/moved"))
    assert endpoint.door_of(1) is endpoint.door_of(1) is not before
    assert len(endpoint._ways) == 1
    endpoint.close()
