"""RESP over TLS: the same server, nothing readable on the way, nobody let in by mistake."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pion_vllm_mlx.server.main import main
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire, request, settle

redis = pytest.importorskip("redis")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


def self_signed(folder: Path, name: str) -> Pair:
    """A certificate for localhost that signs itself."""
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(pair.key)]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(pair.cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair]:
    """The server's certificate and a client's."""
    folder = tmp_path_factory.mktemp("certificates")
    return self_signed(folder, "server"), self_signed(folder, "client")


@dataclass
class TlsServer:
    server: RunningServer
    port: int


def started(folder: Path, pair: Pair, *flags: str) -> TlsServer:
    folder.mkdir(mode=0o700)
    base = free_port_block()
    tls = ("--tls-port", str(base + 3), "--tls-cert-file", str(pair.cert))
    tls += ("--tls-key-file", str(pair.key))
    return TlsServer(RunningServer(base, folder, (*tls, *flags)).start(), base + 3)


@pytest.fixture(scope="module")
def shared_tls(
    tmp_path_factory: pytest.TempPathFactory, pairs: tuple[Pair, Pair]
) -> Iterator[TlsServer]:
    one = started(tmp_path_factory.mktemp("tls") / "data", pairs[0])
    try:
        yield one
    finally:
        one.server.stop()


def secured(port: int, ca: Path, client: Pair | None = None) -> Wire:
    context = ssl.create_default_context(cafile=ca)
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    raw = socket.create_connection(("127.0.0.1", port), timeout=20)
    try:
        return Wire(context.wrap_socket(raw, server_hostname="localhost"))
    except OSError:
        raw.close()
        raise


@pytest.fixture
def tls(shared_tls: TlsServer, pairs: tuple[Pair, Pair]) -> Iterator[Wire]:
    with secured(shared_tls.port, pairs[0].cert) as wire:
        yield wire


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_speaks_to_it_over_tls(
    shared_tls: TlsServer, pairs: tuple[Pair, Pair], protocol: int
) -> None:
    client = redis.Redis(
        port=shared_tls.port,
        ssl=True,
        ssl_ca_certs=str(pairs[0].cert),
        protocol=protocol,
        socket_timeout=20,
    )
    with client:
        assert client.ping()
        client.set("k", b"\x01\x02\xff")
        client.hset("h", mapping={"a": "1"})
        assert client.get("k") == b"\x01\x02\xff" and client.hgetall("h") == {b"a": b"1"}
        with client.pipeline() as pipe:
            assert pipe.set("n", 1).incr("n").get("n").execute() == [True, 2, b"2"]
        client.delete("k", "h", "n")


def test_a_client_that_does_not_know_the_certificate_does_not_connect(
    shared_tls: TlsServer, pairs: tuple[Pair, Pair]
) -> None:
    with pytest.raises(ssl.SSLError):
        secured(shared_tls.port, pairs[1].cert)
    with Wire.tcp(shared_tls.port) as plain, pytest.raises((EOFError, OSError, AssertionError)):
        assert plain.ask("PING") != "PONG"
    with Wire.tcp(shared_tls.server.port) as plain:
        assert plain.ask("PING") == "PONG"


def test_rows_come_back_bit_identical_in_every_form(tls: Wire) -> None:
    """Short and long stores; replies from memory, from files, converted on the way."""
    rows, width = 2100, 1024
    tls.ok("KV.PREFIX.REGISTER", "ns", width, "fp16")
    blob = b"".join(struct.pack("<e", n % 2000) * 8 for n in range(rows * width // 8))
    tls.ok("V.STOREBATCH", "ns_pk", 0, 0, rows, blob, "FMT", "F16")
    tls.ok("V.STOREBATCH", "ns_pv", 0, 0, 3, blob[: 6 * width], "FMT", "F16")
    tls.ok("SSM.PREFIX.STORE", "ns", 0, blob)
    short, long, state, pong, floats = tls.together(
        ("V.FETCH", "ns_pv", 0, "RANGE", 0, 3, "FMT", "NATIVE"),
        ("V.FETCH", "ns_pk", 0, "RANGE", 0, rows, "FMT", "NATIVE"),
        ("SSM.PREFIX.FETCH", "ns", 0),
        ("PING",),
        ("V.FETCH", "ns_pk", 0, "RANGE", 5, 1005),
    )
    assert short == blob[: 6 * width] and long == blob and state == blob and pong == "PONG"
    expected = struct.unpack(f"<{1000 * width}e", blob[10 * width : 2010 * width])
    assert floats == struct.pack(f"<{1000 * width}f", *expected)
    assert tls.ask("KV.PREFIX.DROP", "ns") == 1


def test_uploads_that_break_off_or_stop_hold_up_nobody_and_leave_nothing(
    shared_tls: TlsServer, pairs: tuple[Pair, Pair], tls: Wire
) -> None:
    rows, width = 6000, 1024
    tls.ok("KV.PREFIX.REGISTER", "up", width, "fp16")
    blob = b"".join(struct.pack("<H", n % 30_000) * width for n in range(rows))
    half, whole = (
        request("V.STOREBATCH", "up_pk", layer, 0, rows, blob, "FMT", "STORED") for layer in (0, 1)
    )
    gone, stopped, one = (secured(shared_tls.port, pairs[0].cert) for _ in range(3))
    with stopped, one:
        with gone:
            gone.send(half[: 9 << 20])
        stopped.send(half[: 3 << 20])
        one.send(whole + request("PING"))
        assert [one.reply(), one.reply()] == ["OK", "PONG"]
        fetch = ("V.FETCH", "up_pk", 1, "RANGE", 0, rows, "FMT", "STORED")
        assert one.ask(*fetch) == blob
        assert tls.ask("V.FETCH", "up_pk", 0, "RANGE", 0, 1) is None
        stopped.send(half[3 << 20 :])
        assert stopped.reply() == "OK"
    assert tls.ask("V.FETCH", "up_pk", 0, "RANGE", 0, rows, "FMT", "STORED") == blob
    settle(tls)
    assert tls.ask("KV.PREFIX.DROP", "up") == 1


def test_a_reader_that_stops_costs_no_more_than_windows(
    shared_tls: TlsServer, pairs: tuple[Pair, Pair], tls: Wire
) -> None:
    blob = bytes(64 << 20)
    tls.ok("SSM.PREFIX.STORE", "slow", 0, blob)
    before = int(tls.info("INFO", "memory")["used_memory_anonymous"])
    readers = [secured(shared_tls.port, pairs[0].cert) for _ in range(4)]
    try:
        for reader in readers:
            reader.send(request("SSM.PREFIX.FETCH", "slow", 0) + request("PING"))
        for _ in range(20):
            assert tls.ask("PING") == "PONG"
        for reader in readers:
            assert reader.sock.recv(1)
        for _ in range(15):
            grown = int(tls.info("INFO", "memory")["used_memory_anonymous"]) - before
            assert grown < 48 << 20
            time.sleep(0.1)
        reader = readers.pop()
        rest = reader.incoming.read(len(b"67108864\r\n") + len(blob) + 2 + 7)
        reader.close()
        assert rest == b"67108864\r\n" + blob + b"\r\n+PONG\r\n"
    finally:
        for reader in readers:
            reader.close()
    assert tls.ask("PING") == "PONG"
    tls.ask("SSM.PREFIX.DROP", "slow")


def test_half_a_handshake_and_a_closed_one_leave_the_server_well(
    shared_tls: TlsServer, tls: Wire
) -> None:
    for start in (b"", b"\x16\x03", b"PING\r\n", b"\x00" * 100):
        with socket.create_connection(("127.0.0.1", shared_tls.port), timeout=5) as raw:
            raw.sendall(start)
    assert tls.ask("PING") == "PONG"
    assert tls.info("INFO", "server")["tls_port"] == str(shared_tls.port)


def test_a_server_stops_in_the_middle_of_handshakes_and_uploads_without_a_word(
    tmp_path: Path, pairs: tuple[Pair, Pair]
) -> None:
    one = started(tmp_path / "data", pairs[0])
    with contextlib.ExitStack() as stack:
        for begun in (b"", b"\x16\x03\x01"):
            raw = socket.create_connection(("127.0.0.1", one.port), timeout=20)
            stack.enter_context(raw).sendall(begun)
        # let in after them
        tls = stack.enter_context(secured(one.port, pairs[0].cert))
        tls.ok("KV.PREFIX.REGISTER", "ns", 512, "fp16")
        upload = request("V.STOREBATCH", "ns_pk", 0, 0, 20_000, bytes(20_000 * 1024))
        tls.send(upload[: 5 << 20])
        assert one.server.stop() == 0
    assert len(one.server.output().splitlines()) == 1, one.server.output()


def test_with_a_ca_only_its_clients_get_in(tmp_path: Path, pairs: tuple[Pair, Pair]) -> None:
    server, client = pairs
    one = started(tmp_path / "data", server, "--tls-ca-cert-file", str(client.cert))
    try:
        with secured(one.port, server.cert, client) as wire:
            assert wire.ask("PING") == "PONG"
        for wrong in (None, server):
            # TLS 1.3 tells the client with its first read
            with pytest.raises((OSError, EOFError)), secured(one.port, server.cert, wrong) as wire:
                wire.ask("PING")
    finally:
        one.server.stop()


def test_a_tenant_authenticates_over_tls(tmp_path: Path, pairs: tuple[Pair, Pair]) -> None:
    flags = ("--requirepass", "adm", "--tenant", "a=pa", "--bind", "127.0.0.1")
    one = started(tmp_path / "data", pairs[0], *flags)
    try:
        with secured(one.port, pairs[0].cert) as wire:
            assert wire.ask("PING").startswith("NOAUTH")
            wire.ok("AUTH", "a", "pa")
            wire.ok("SET", "k", "v")
            assert wire.ask("KEYS", "*") == [b"k"]
    finally:
        one.server.stop()


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--tls-port", "1"], "--tls-cert-file"),
        (["--tls-port", "1", "--tls-cert-file", "x"], "--tls-key-file"),
        (["--tls-cert-file", "x"], "--tls-port"),
        (["--tls-ca-cert-file", "x"], "--tls-port"),
        (["--tls-port", "x"], "--tls-port"),
    ],
)
def test_flags_that_do_not_make_a_certificate_are_fatal(
    capsys: pytest.CaptureFixture[str], flags: list[str], fragment: str
) -> None:
    assert main(["-p", "0", "--dir", "/no/such/folder", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("FATAL ") and fragment in error


def test_files_that_are_no_certificate_are_fatal_and_nothing_listens(
    tmp_path: Path, pairs: tuple[Pair, Pair]
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    absent = tmp_path / "no"
    cases = [
        (wrong, pairs[0].key, f"--tls-cert-file {wrong} with --tls-key-file"),
        (pairs[0].cert, pairs[1].key, f"with --tls-key-file {pairs[1].key} cannot be used"),
        (absent, wrong, f"--tls-cert-file: {absent} cannot be read: No such file"),
        (pairs[0].cert, absent, f"--tls-key-file: {absent} cannot be read: No such file"),
    ]
    for number, (cert, key, fragment) in enumerate(cases):
        with pytest.raises(RuntimeError, match=f"FATAL .*{fragment}"):
            started(tmp_path / f"data{number}", Pair(cert, key))


def test_who_does_not_finish_its_handshake_takes_the_place_of_a_client(
    tmp_path: Path, pairs: tuple[Pair, Pair]
) -> None:
    one = started(tmp_path / "data", pairs[0], "--maxclients", "4")
    silent: list[socket.socket] = []
    try:
        closed = 0
        for _ in range(12):
            silent.append(socket.create_connection(("127.0.0.1", one.port), timeout=20))
        for sock in silent:
            sock.settimeout(1)
            try:
                closed += sock.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed += 1
        assert closed >= 8
        for sock in silent:
            sock.close()
        clients = []
        for _ in range(100):
            try:
                clients.append(secured(one.port, pairs[0].cert))
            except OSError:
                time.sleep(0.05)
                continue
            if len(clients) == 4:
                break
        # all places are there again, and no handshake is counted twice
        assert [client.ask("PING") for client in clients] == ["PONG"] * 4
        for client in clients:
            client.close()
    finally:
        one.server.stop()
