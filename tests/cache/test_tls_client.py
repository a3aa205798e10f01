"""tls:// leads to the server that its certificate proves, and nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_advice import with_advice
from pion_vllm_mlx.cache.store_client_endpoint import Endpoint
from pion_vllm_mlx.cache.store_url import parse_url
from pion_vllm_mlx.config import ClientTls
from pion_vllm_mlx.errors import ConfigError, DeadlineExceeded, StoreUnavailable
from tests.certificates import Certificate, self_signed
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids

BLOB = np.random.default_rng(7).bytes(9_000_001)


@dataclass(frozen=True)
class Secure:
    """A server with a TLS port, and the certificates around it."""

    server: RunningServer
    port: int
    own: Certificate
    other: Certificate

    def url(self, certificate: Certificate, *more: str) -> str:
        return "&".join([f"tls://localhost:{self.port}?ca={certificate.cert}", *more])

    def connection(self, certificate: Certificate, seconds: float = 20.0) -> RespConnection:
        address = parse_url(self.url(certificate)).address
        assert address is not None
        return RespConnection(address, deadline_seconds=seconds)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    own, other = self_signed(folder, "own"), self_signed(folder, "other")
    (folder / "data").mkdir(mode=0o700)
    base = free_port_block()
    server = RunningServer(base, folder / "data", own.server_flags(base + 3))
    try:
        yield Secure(server.start(), base + 3, own, other)
    finally:
        server.stop()


def test_large_commands_and_replies_cross_it_unchanged(secure: Secure) -> None:
    with secure.connection(secure.own) as connection:
        assert connection.command("SET", "large", BLOB) == "OK"
        assert connection.command("GET", "large") == BLOB
        together = [("GET", "large"), ("SET", "again", BLOB), ("GET", "again")]
        assert connection.pipeline(together) == [BLOB, "OK", BLOB]
        into = bytearray(len(BLOB))
        connection.fetch_into(("GET", "large"), [into])
        assert into == BLOB
        connection.command("DEL", "large", "again")


def test_one_connection_serves_call_after_call(secure: Secure) -> None:
    # what TLS itself sends between two calls, such as tickets, is no sign of an end
    with secure.connection(secure.own) as connection:
        ids = {connection.command("CLIENT", "ID") for _ in range(5)}
    assert len(ids) == 1


def test_a_server_that_went_away_is_noticed_and_connected_to_again(secure: Secure) -> None:
    with secure.connection(secure.own) as connection:
        assert connection.command("PING") == "PONG"
        secure.server.restart()
        assert connection.command("PING") == "PONG"


def test_a_forked_child_leaves_its_parents_connection_whole(secure: Secure) -> None:
    with secure.connection(secure.own) as connection:
        before = connection.command("CLIENT", "ID")
        child = os.fork()
        if child == 0:
            os._exit(0 if connection.command("CLIENT", "ID") != before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.command("CLIENT", "ID") == before


def test_an_unknown_certificate_is_refused_and_the_advice_names_the_ca(secure: Secure) -> None:
    with secure.connection(secure.other) as connection:
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED") as refused:
            connection.command("PING")
    assert "PION_TLS_CA_FILE" in with_advice(refused.value)
    assert "--tls-ca-file" in with_advice(refused.value, command_line=True)


def test_without_a_ca_the_systems_trust_decides(secure: Secure) -> None:
    address = Address("localhost", secure.port, tls=ClientTls())
    with RespConnection(address, deadline_seconds=20.0) as connection:
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            connection.command("PING")


def test_a_certificate_of_another_host_is_refused(secure: Secure) -> None:
    address = Address("127.0.0.1", secure.port, tls=ClientTls(secure.own.cert))
    with RespConnection(address, deadline_seconds=20.0) as connection:
        with pytest.raises(StoreUnavailable, match="IP address mismatch") as refused:
            connection.command("PING")
    assert "name the host as" in with_advice(refused.value)


def test_either_kind_of_port_says_which_url_it_needs(secure: Secure) -> None:
    plain = Address("localhost", secure.port)
    with RespConnection(plain, deadline_seconds=20.0) as connection:
        with pytest.raises(StoreUnavailable, match="tls://"):
            connection.command("PING")
    tls = Address("localhost", secure.server.port, tls=ClientTls(secure.own.cert))
    with RespConnection(tls, deadline_seconds=20.0) as connection:
        with pytest.raises(StoreUnavailable) as refused:
            connection.command("PING")
    assert "no TLS is spoken there" in with_advice(refused.value)


def test_a_handshake_that_is_not_answered_ends_by_the_deadline(secure: Secure) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        address = Address("127.0.0.1", port, tls=ClientTls(secure.own.cert))
        with RespConnection(address, deadline_seconds=0.2) as connection:
            with pytest.raises(DeadlineExceeded):
                connection.command("PING")


def test_a_reply_that_stops_ends_by_the_deadline(secure: Secure) -> None:
    with secure.connection(secure.own, seconds=0.3) as connection:
        assert connection.command("PING", deadline_seconds=20.0) == "PONG"
        os.kill(secure.server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):
                connection.command("SET", "stopped", BLOB)
        finally:
            os.kill(secure.server.pid, signal.SIGCONT)


def test_threads_share_a_connection(secure: Secure) -> None:
    with secure.connection(secure.own) as connection:
        found: list[object] = []

        def work(number: int) -> None:
            blob = BLOB[number : 100_000 + number]
            connection.command("SET", f"t{number}", blob)
            found.append(connection.command("GET", f"t{number}") == blob)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 6


def test_a_client_certificate_is_shown_where_the_server_wants_one(
    tmp_path: Path, secure: Secure
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    base = free_port_block()
    flags = (*secure.own.server_flags(base + 3), "--tls-ca-cert-file", str(secure.other.cert))
    server = RunningServer(base, tmp_path / "data", flags)
    shown = f"&cert={secure.other.cert}&key={secure.other.key}"
    try:
        server.start()
        for more in ("", shown):
            place = parse_url(f"tls://localhost:{base + 3}?ca={secure.own.cert}{more}")
            assert place.address is not None
            with RespConnection(place.address, deadline_seconds=20.0) as connection:
                if more:
                    assert connection.command("PING") == "PONG"
                    continue
                with pytest.raises(StoreUnavailable, match="PION_TLS_CERT_FILE"):
                    connection.command("PING")
    finally:
        server.stop()


def test_the_files_come_from_the_url_else_from_the_environment(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_TLS_CA_FILE", str(secure.own.cert))
    place = parse_url("tls://HOST:5")
    assert place.address == Address("host", 5, tls=ClientTls(secure.own.cert))
    place = parse_url(f"tls://host:5/?ca={secure.other.cert}")
    assert place.address == Address("host", 5, tls=ClientTls(secure.other.cert))
    assert place.address != Address("host", 5)


@pytest.mark.parametrize(
    ("rest", "what"),
    [
        ("host", "--tls-port"),
        ("host:x", "x"),
        (":5", "--tls-port"),
        ("host:5/0", "--tls-port"),
        ("host:5?verify=no", "ca=FILE"),
        ("host:5?ca=", "ca=FILE"),
        ("host:5?nonsense", "ca=FILE"),
        ("host:5?ca=/no/such/file", "/no/such/file cannot be read"),
        ("host:5#x", "%23"),
        ("user:secret@host:5", "PION_REQUIREPASS"),
    ],
)
def test_what_a_tls_url_cannot_say_is_refused_at_once(rest: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        parse_url(f"tls://{rest}")
    assert "secret" not in str(refused.value)


def test_a_file_without_a_certificate_is_named(tmp_path: Path, secure: Secure) -> None:
    (empty := tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=f"{empty} holds no certificate"):
        parse_url(f"tls://host:5?ca={empty}")
    with pytest.raises(ConfigError, match=f"{secure.own.cert}.*{secure.other.key}"):
        parse_url(f"tls://host:5?cert={secure.own.cert}&key={secure.other.key}")
    with pytest.raises(ConfigError, match="a key needs its certificate"):
        parse_url(f"tls://host:5?key={secure.own.key}")


def test_a_worker_of_several_is_never_reached_in_the_clear(tmp_path: Path, secure: Secure) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    base = free_port_block(6)
    flags = (*secure.own.server_flags(base + 5), "-w", "2", "--independent-workers")
    server = RunningServer(base, tmp_path / "data", flags)
    endpoint = Endpoint(parse_url(f"tls://localhost:{base + 5}?ca={secure.own.cert}"), None, 20.0)
    try:
        server.start()
        assert endpoint.workers() == 2
        with pytest.raises(StoreUnavailable, match="has no TLS"):
            endpoint.door_of(1)
    finally:
        endpoint.close()
        server.stop()


def test_a_prefix_is_stored_found_looked_at_and_moved_over_tls(
    secure: Secure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_EXPORT", "1")
    model, ids = tiny_model("llama"), token_ids(70)
    with PionPromptCache(model, url=secure.url(secure.own)) as pion:
        pion.get_or_prefill(ids, "over-tls")
    with PionPromptCache(model, url=secure.url(secure.own)) as pion:
        pion.get_or_prefill(ids, "over-tls")
        assert (pion.hits, pion.last_miss_reason) == (1, None)
    url = ["--url", f"tls://localhost:{secure.port}"]
    trusted = [*url, "--tls-ca-file", str(secure.own.cert)]
    file = str(tmp_path / "p.safetensors")
    assert cli.main(["explain", "over-tls", *trusted]) == 0
    assert cli.main(["export", "over-tls", file, *trusted]) == 0
    assert cli.main(["import", file, "--namespace", "again", *trusted]) == 0
    assert cli.main(["explain", "again", *trusted]) == 0
    assert cli.main(["conversations", *trusted]) == 0
    assert cli.main(["explain", "over-tls", *url]) == 1
    monkeypatch.setenv("PION_TLS_CA_FILE", str(secure.own.cert))
    assert cli.main(["stats", *url]) == 0


def test_a_ca_for_a_place_without_tls_is_refused(
    secure: Secure, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = f"tcp://127.0.0.1:{secure.server.port}"
    command = ["stats", "--url", plain, "--tls-ca-file", str(secure.own.cert)]
    assert cli.main(command) == 1
    assert "--tls-ca-file is for a tls:// URL" in capsys.readouterr().err
