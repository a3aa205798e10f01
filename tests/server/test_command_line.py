"""How the server starts, where it listens, who it lets in, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.config import ServerEnvironment
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.ephemeral import ephemeral_folder
from pion_vllm_mlx.server.main import main
from pion_vllm_mlx.server.options import parse
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Refusal, Wire, refuse, request

ROW = bytes.fromhex("0000803f000000c00000003f00000000")
PASSWORD = "a pass word"


def run(*flags: str, cwd: Path | None = None) -> tuple[int, str]:
    """Exit code and output of a server that is expected to end by itself."""
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", *flags]
    here = Path(__file__).parents[2]
    env = dict(os.environ, PYTHONPATH=str(here))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, cwd=cwd, env=env
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--kvcahce"], ["--kvcahce", "did you mean --kvcache"]),
        (["--requirepas", "x"], ["--requirepas", "did you mean --requirepass"]),
        (["--mlx-attention"], ["--mlx-attention", "did you mean --"]),
        (["--unix-socket", "x"], ["did you mean --unixsocket"]),
        (["--port"], ["--port requires a value"]),
        (["-p"], ["requires a value"]),
        (["--requirepass"], ["requires a value"]),
        (["--port", "abc"], ["--port", "abc"]),
        (["--port", "-1"], ["--port"]),
        (["--port", "70000"], ["--port"]),
        (["--bind", "localhost"], ["not a valid IPv4"]),
        (["--bind", "::1"], ["not a valid IPv4"]),
        (["--bind", "300.0.0.1"], ["not a valid IPv4"]),
        (["-w", "2"], ["--independent-workers"]),
        (["-w", "2", "--profile", "kv"], ["--independent-workers"]),
        (["-w", "2", "--independent-workers", "--embedded"], ["one worker"]),
        (["-w", "4", "--independent-workers", "-p", "65531"], ["own ports"]),
        (["--wal-full-policy", "drop"], ["--wal-full-policy"]),
        (["--appendfsync", "maybe"], ["always", "everysec", "no"]),
        (["--disk-budget", "20 GB"], ["--disk-budget"]),
        (["--disk-budget", "-5"], ["--disk-budget"]),
        (["--max-sessions", "0"], ["--max-sessions"]),
        (["--cluster"], ["clusters are not supported"]),
        (["--cluster-host", "x"], ["clusters are not supported"]),
        (["--tenant", "a=b"], ["--tenant"]),
        (["--maxmemory", "lots"], ["--maxmemory"]),
        (["--maxmemory", "0%"], ["--maxmemory"]),
        (["--maxmemory", "101%"], ["--maxmemory"]),
        (["--maxmemory", "-5"], ["--maxmemory"]),
        (["--maxmemory", "5%%"], ["--maxmemory"]),
        (["--maxmemory", ""], ["--maxmemory"]),
        (["--maxmemory-policy", "allkeys-lru"], ["allkeys-lru", "noeviction", "durable"]),
        (["--maxmemory-policy", "volatile-ttl"], ["volatile-ttl", "noeviction", "durable"]),
        (["--maxmemory-policy", "lru"], ["'lru' is not one of noeviction"]),
        (["--share-equal", "maybe"], ["--share-equal", "'maybe' is not one of on, off"]),
        (["--timeout", "-1"], ["--timeout"]),
        (["--maxclients", "0"], ["--maxclients"]),
        (["--output-timeout", "0"], ["--output-timeout"]),
        (["--client-output-limit", "x"], ["--client-output-limit"]),
        (["--requirepass", ""], ["empty"]),
        (["--requirepass="], ["empty"]),
        (["--requirepass-file", "/no/such/file"], ["--requirepass-file"]),
        (["--kvcache=yes"], ["--kvcache takes no value"]),
        (["--profile", "fast"], ["--profile"]),
        (["stray"], ["stray"]),
    ],
    ids=lambda value: "_".join(value)[:40],
)
def test_a_wrong_command_line_is_fatal_and_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], fragments: list[str]
) -> None:
    # none of them gets as far as to open its folder
    assert main(["-p", "0", "--dir", "/no/such/folder", *flags]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("FATAL ") and not output.out
    for fragment in fragments:
        assert fragment in output.err


def test_a_wrong_command_line_ends_the_process(tmp_path: Path) -> None:
    code, output = run("-p", "0", "--kvcahce", cwd=tmp_path)
    assert code == 1 and "FATAL" in output and "did you mean --kvcache" in output
    code, output = run("-p", "0", "--unixsocket", "x" * 120, cwd=tmp_path)
    assert code == 1 and "FATAL" in output and "longer than" in output


def test_a_password_that_no_client_can_send_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pw").write_bytes(b"\xff\xfe\n")
    assert main(["-p", "0", "--requirepass-file", str(tmp_path / "pw")]) == 1
    assert "is not UTF-8 text" in capsys.readouterr().err
    monkeypatch.setenv("PION_REQUIREPASS", "\udcff")
    assert main(["-p", "0", "--dir", str(tmp_path / "data")]) == 1
    assert "PION_REQUIREPASS must be UTF-8 text" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="PION_REQUIREPASS"):
        ServerEnvironment.from_environment()
    for words in (["--requirepass", "\udcff"], ["--requirepass", "x", "--tenant", "a=\udcff"]):
        with pytest.raises(ConfigError, match="must be UTF-8 text"):
            parse(words, ServerEnvironment())


def test_an_empty_password_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in ("", "\n"):
        (tmp_path / "pw").write_text(content)
        assert main(["-p", "0", "--requirepass-file", str(tmp_path / "pw")]) == 1
        output = capsys.readouterr().err
        assert "empty" in output and "FATAL" in output


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        output = capsys.readouterr().out
        assert "--appendfsync" in output and "--stall-timeout" in output
    for flag in ("-v", "--version"):
        assert main([flag]) == 0
        assert re.search(r"\d+\.\d+\.\d+", capsys.readouterr().out)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """A server that the test starts with its own flags."""
    folder = tmp_path / "data"
    one = RunningServer(free_port_block(), folder)
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.parametrize("profile", ["kv", "vector", "ai", "full"])
def test_flags_of_other_servers_are_accepted(server: RunningServer, profile: str) -> None:
    flags = ["--no-auto-detect", "--no-auto-embed", "--auto-embed", "--nle-embed", "--inference"]
    flags += ["--flare", "--emb-enabled", "--llm-enabled", "--moe-cache", "x", "--moe-cache-mib"]
    flags += ["8", "--no-crash-log", "--crash-log", "f", "--status-file", "f", "--epoll"]
    flags += ["--iouring", "--sqpoll", "--xdp", "--xdp-iface", "e", "--io-threads", "4"]
    flags += ["--huge-pages", "--no-blob-tier", "--lua-time-limit", "5", "--lua-memory-limit", "5m"]
    flags += ["--profile", profile, "--fa-window", "0", "-w", "1", "--rss-warn-pct", "80"]
    flags += ["--wal-max-segments", "3", "--wal-full-policy", "refuse", "--metal-attention"]
    flags += ["--blob-threshold", "1", "--wal-size", "8", "--maxmemory-policy", "noeviction"]
    server.start(*flags)
    for flag in ("--nle-embed", "--inference", "--flare", "--emb-enabled", "--llm-enabled"):
        assert f"{flag} has no effect" in server.output()
    assert not (server.dir / "f").exists()


def test_files_and_folders_are_private(server: RunningServer) -> None:
    previous = os.umask(0)
    try:
        server.start("--unixsocket", str(server.dir / "s"))
    finally:
        os.umask(previous)
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp16")
        wire.ok("V.STOREBATCH", "a_pk", 0, 0, 9_000, ROW * 9_000)
        wire.ok("V.STOREBATCH", "a_pv", 0, 0, 1, ROW)
        wire.ok("SSM.PREFIX.STORE", "a", 0, b"x")
        assert wire.ask("V.EXPORT", "a_pk", "a_pk", 0, 9, 1, 1, 4)
        wire.ok("KV.PREFIX.SAVE")
        wire.ok("KV.PREFIX.SAVE", "copy")
        seen = set()
        for path in [server.dir, *server.dir.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            seen.add(path.name)
            if path.name != ".metadata_never_index":
                assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
        assert {"pion.vstore.0", "pion.ssm.0", "pion.vstore.wal.0", "pion.ssm.wal.0"} <= seen
        assert {"copy", "pion-export", "pion.segments.0", "s"} <= seen
        assert not any(name.endswith(".tmp") for name in seen)


def test_the_unix_socket_serves_and_goes_with_the_server(server: RunningServer) -> None:
    with tempfile.TemporaryDirectory() as short:
        path = str(Path(short) / "s")
        server.start("--unixsocket", path)
        with Wire.unix(path) as wire:
            assert wire.info("INFO", "server")["unix_socket"] == path
            wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp16")
            wire.ok("V.STOREBATCH", "a_pk", 0, 0, 200_000, ROW * 200_000)
            wire.ok("V.STOREBATCH", "a_pv", 0, 0, 1, ROW)
            assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 200_000) == ROW * 200_000
            assert isinstance(wire.ask("KV.PREFIX.MAP", "a"), bytes)
        # a killed server leaves its socket, the next one takes its place
        server.restart("--unixsocket", path)
        with Wire.unix(path) as wire:
            assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
        assert server.stop() == 0
        assert not Path(path).exists()


def test_a_file_in_the_way_of_the_socket_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    code, output = run("-p", "0", "--unixsocket", str(tmp_path / "f"), cwd=tmp_path)
    assert code == 1 and "not a socket" in output
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("more", [(), ("-w", "2", "--independent-workers"), ("--embedded",)])
def test_a_socket_that_cannot_be_made_is_named_with_its_flag(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    port = str(free_port_block())
    path = tmp_path / "nope" / "x.sock"
    code, output = run("-p", port, "--unixsocket", str(path), *more, cwd=tmp_path)
    assert code == 1 and "FATAL" in output and "Traceback" not in output
    assert "--unixsocket" in output and str(path.parent) in output


@pytest.mark.parametrize("more", [(), ("-w", "2", "--independent-workers")])
def test_a_memory_limit_below_the_servers_own_use_is_refused_with_the_figure(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    port = str(free_port_block())
    code, output = run("-p", port, "--maxmemory", "1mb", *more, cwd=tmp_path)
    assert code == 1 and "FATAL" in output and "Traceback" not in output
    assert re.search(r"--maxmemory: [\d,]+ bytes are less than the [\d,]+ that the server", output)


def test_a_server_whose_data_is_past_the_memory_limit_starts_and_says_so(
    server: RunningServer,
) -> None:
    server.start()
    with Wire.tcp(server.port) as wire:
        before = int(wire.info("INFO", "memory")["used_memory_anonymous"])
        for number in range(96):
            wire.ok("SET", f"k{number}", bytes(1 << 20))
    server.restart("--maxmemory", str(before + (48 << 20)))
    assert "every write is refused until something is deleted" in server.output()
    with Wire.tcp(server.port) as wire:
        assert str(wire.ask("SET", "k", "v")).startswith("OOM")
        assert wire.ask("DEL", *(f"k{number}" for number in range(96))) == 96
        wire.ok("SET", "k", "v")


def test_the_socket_of_a_living_server_is_not_taken(server: RunningServer, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short:
        path = str(Path(short) / "s")
        server.start("--unixsocket", path)
        other = ("--dir", str(tmp_path / "other"))
        code, output = run("-p", "0", "--unixsocket", path, *other, cwd=tmp_path)
        assert code == 1 and "another process listens" in output
        with Wire.unix(path) as wire:
            assert wire.info("INFO", "server")["tcp_port"] == str(server.port)


def test_a_second_server_on_the_same_folder_says_who_has_it(server: RunningServer) -> None:
    server.start()
    code, output = run("-p", "0", "--kvcache", "--dir", str(server.dir))
    assert code == 3
    assert "FATAL" in output and f"process {server.pid}, port {server.port}" in output
    server.kill()
    server.start()


def test_a_port_in_use_is_fatal(server: RunningServer, tmp_path: Path) -> None:
    server.start()
    code, output = run("-p", str(server.port), cwd=tmp_path)
    assert code == 1 and "FATAL" in output and str(server.port) in output


def listening_addresses(pid: int) -> set[str]:
    """Local addresses in LISTEN state of this process, as hex, from /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that was just closed
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and columns[9] in inodes:
            raw = bytes.fromhex(columns[1].split(":")[0])
            found.add(socket.inet_ntoa(raw[::-1]))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_only_a_password_or_bind_opens_the_server_to_others(server: RunningServer) -> None:
    server.start()
    assert listening_addresses(server.pid) == {"127.0.0.1"}
    server.restart("--requirepass", "x")
    assert listening_addresses(server.pid) == {"0.0.0.0"}
    server.restart("--requirepass", "x", "--bind", "127.0.0.1")
    assert listening_addresses(server.pid) == {"127.0.0.1"}


def own_address() -> str | None:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


def test_paths_are_told_to_local_clients_only(server: RunningServer) -> None:
    address = own_address()
    if address is None:
        pytest.skip("this host has no address but loopback")
    server.start("--bind", "0.0.0.0")
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp16")
        wire.ok("V.STOREBATCH", "a_pk", 0, 0, 1, ROW)
        assert isinstance(wire.ask("KV.PREFIX.MAP", "a"), bytes)
    with Wire(socket.create_connection((address, server.port), timeout=20)) as wire:
        refuse(wire, "on this host", "KV.PREFIX.MAP", "a")
        refuse(wire, "on this host", "V.EXPORT", "a_pk", "a_pk", 0, 1, 1, 1, 4)
        assert wire.ask("V.FETCH", "a_pk", 0, 0) == ROW


NOAUTH = "NOAUTH Authentication required."
WRONGPASS = "WRONGPASS invalid username-password pair or user is disabled."


def test_nothing_is_served_without_the_password(server: RunningServer) -> None:
    server.start("--requirepass", PASSWORD)
    with Wire.tcp(server.port) as wire:
        for words in (
            ("PING",),
            ("INFO",),
            ("COMMAND",),
            ("CLIENT", "ID"),
            ("KV.PREFIX.REGISTER", "a", 4, "fp16"),
            ("V.STOREBATCH", "a_pk", 0, 0, 1, ROW),
            ("SSM.PREFIX.FETCH", "a", 0),
            ("SHUTDOWN",),
            ("SSM.PREFIX.STORE", "a", 0, bytes(16_000)),
        ):
            assert wire.ask(*words) == NOAUTH, words[0]
        assert str(wire.ask("HELLO", 3)).startswith("NOAUTH ")
        assert wire.ask("AUTH", "wrong") == WRONGPASS
        assert wire.ask("AUTH", "") == WRONGPASS
        assert wire.ask("AUTH", "somebody", PASSWORD) == WRONGPASS
        assert wire.ask("HELLO", 3, "AUTH", "default", "wrong") == WRONGPASS
        assert wire.ask("PING") == NOAUTH
        assert isinstance(wire.ask("HELLO", 3, "AUTH", "default", PASSWORD), dict)
        assert wire.ask("PING") == "PONG"
        assert wire.ask("HELLO", 2, "AUTH", "default", "wrong") == WRONGPASS
        assert wire.ask("PING") == "PONG"
        assert isinstance(wire.ask("PION.STATS"), dict)
        assert wire.ask("RESET") == "RESET"
        assert wire.ask("PING") == NOAUTH
        assert wire.ask("AUTH", PASSWORD) == "OK"
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "MISS"
        assert wire.ask("QUIT") == "OK"
    # in one write with what it allows
    blob = bytes(range(256)) * 40_000
    with Wire.tcp(server.port) as wire:
        wire.send(request("AUTH", "default", PASSWORD))
        wire.send(request("SSM.PREFIX.STORE", "a", 0, blob) + request("SSM.PREFIX.FETCH", "a", 0))
        assert [wire.reply(), wire.reply(), wire.reply()] == ["OK", "OK", blob]


def test_the_password_may_come_from_a_file_or_the_environment(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pw").write_text(PASSWORD + "\n")
    server.start("--requirepass-file", str(tmp_path / "pw"))
    with Wire.tcp(server.port) as wire:
        assert wire.ask("AUTH", PASSWORD + "\n") == WRONGPASS
        assert wire.ask("AUTH", PASSWORD) == "OK"
    monkeypatch.setenv("PION_REQUIREPASS", "from the environment")
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("PING") == NOAUTH
        assert wire.ask("AUTH", "from the environment") == "OK"
    if Path("/proc").exists():
        assert b"environment" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()


def test_ns_prefix_guards_every_namespace_and_session(server: RunningServer) -> None:
    server.start("--ns-prefix", "team:")
    guard = "namespace must start with required prefix 'team:'"
    with Wire.tcp(server.port) as wire:
        for words in (
            ("KV.PREFIX.REGISTER", "a", 4, "fp16"),
            ("KV.PREFIX.REGISTER", "Team:a", 4, "fp16"),
            ("KV.PREFIX.LOOKUP", "a"),
            ("KV.PREFIX.DROP", "team:a", "a"),
            ("KV.PREFIX.MAP", "a"),
            ("KV.PREFIX.EXPLAIN", "a"),
            ("V.CREATE", "a", 4),
            ("V.STOREBATCH", "a", 0, 0, 1, ROW),
            ("V.STOREBATCH", "a", 0, 0, 600_000, ROW * 600_000),
            ("V.FETCH", "a", 0, 0),
            ("V.INFO", "a"),
            ("V.DROP", "team:a", "a"),
            ("V.EXPORT", "team:a", "a", 0, 1, 1, 1, 4),
            ("V.EXPORT", "a", "team:a", 0, 1, 1, 1, 4),
            ("SSM.PREFIX.STORE", "a", 0, b"x"),
            ("SSM.PREFIX.FETCH", "a", 0),
            ("SSM.PREFIX.DROP", "a"),
        ):
            refuse(wire, guard, *words)
        wire.ok("KV.PREFIX.REGISTER", "team:a", 4, "fp16")
        assert wire.ask("KV.PREFIX.LOOKUP", "team:a") == "HIT"
        assert wire.info("V.INFO")["enabled"] == "1"
        wire.ok("KV.PREFIX.COMMIT")
        wire.ok("KV.PREFIX.SAVE")


def test_without_kvcache_only_states_are_served(tmp_path: Path) -> None:
    port = free_port_block()
    command = [sys.executable, "-m", "pion_vllm_mlx", "server", "-p", str(port), "-w", "1"]
    process = subprocess.Popen([*command, "--dir", str(tmp_path / "d")], stdout=subprocess.DEVNULL)
    try:
        wire = None
        deadline = time.monotonic() + 20
        while wire is None and time.monotonic() < deadline:
            try:
                wire = Wire.tcp(port)
            except ConnectionRefusedError:
                time.sleep(0.02)
        assert wire is not None
        for words in (
            ("KV.PREFIX.LOOKUP", "a"),
            ("KV.PREFIX.INFO",),
            ("V.CREATE", "a", 4),
            ("V.STOREBATCH", "a", 0, 0, 1, ROW),
            ("V.INFO",),
        ):
            answer = wire.ask(*words)
            assert isinstance(answer, Refusal) and "V-store not enabled" in answer
            assert "(use --kvcache)" in answer
        wire.ok("SSM.PREFIX.STORE", "a", 0, b"x")
        assert wire.ask("SSM.PREFIX.FETCH", "a", 0) == b"x"
        assert wire.together(("PING",), ("PING",)) == ["PONG", "PONG"]
        wire.send(request("PING") + request("SHUTDOWN", "NOSAVE") + request("PING"))
        assert wire.reply() == "PONG" and wire.closed()
        wire.close()
        assert process.wait(timeout=15) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_ephemeral_leaves_nothing(server: RunningServer, tmp_path: Path) -> None:
    server.dir.mkdir()
    server.start("--ephemeral")
    with Wire.tcp(server.port) as wire:
        folder = Path(wire.info("INFO", "server")["config_dir"])
        assert folder != server.dir and stat.S_IMODE(folder.stat().st_mode) == 0o700
        wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp16")
        for side in ("a_pk", "a_pv"):
            wire.ok("V.STOREBATCH", side, 0, 0, 200_000, ROW * 200_000)
            wire.ok("V.STOREBATCH", side, 1, 0, 1, ROW)
        wire.ok("SSM.PREFIX.STORE", "a", 0, b"x")
        assert wire.ask("V.FETCH", "a_pk", 1, 0) == ROW
        assert isinstance(wire.ask("KV.PREFIX.MAP", "a"), bytes)
        assert any(folder.rglob("*.safetensors"))
        assert not (folder / "pion.vstore.wal.0").exists()
    assert server.stop() == 0
    assert not folder.exists() and not list(server.dir.iterdir())
    assert len(list(tmp_path.iterdir())) == 2  # the folder and the log of this test


def test_what_a_killed_ephemeral_server_left_goes_with_the_next_and_a_running_ones_stays(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, an_hour_ago = tmp_path / "temporary", time.time() - 3600
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    server.dir.mkdir()
    server.start("--ephemeral")
    with Wire.tcp(server.port) as wire:
        folder = Path(wire.info("INFO", "server")["config_dir"])
    assert folder.parent == temporary
    other = temporary / "pion-ephemeral-theirs"
    other.symlink_to(server.dir)
    os.utime(folder, (an_hour_ago, an_hour_ago))
    with ephemeral_folder_of(temporary):
        assert folder.exists()
    server.kill()
    assert folder.exists()
    os.utime(folder, (an_hour_ago, an_hour_ago))
    server.start("--ephemeral")
    assert not folder.exists()
    assert other.is_symlink() and server.dir.exists()


@contextlib.contextmanager
def ephemeral_folder_of(temporary: Path) -> Iterator[Path]:
    """As a second server would make it, in this process."""
    tempfile.tempdir, before = str(temporary), tempfile.tempdir
    try:
        with ephemeral_folder() as folder:
            yield folder
    finally:
        tempfile.tempdir = before


def test_without_a_wal_only_a_save_keeps_anything(server: RunningServer) -> None:
    server.start("--no-wal")
    with Wire.tcp(server.port) as wire:
        refuse(wire, "--no-wal", "KV.PREFIX.COMMIT")
        refuse(wire, "nothing to save", "KV.PREFIX.SAVE")
        wire.ok("KV.PREFIX.REGISTER", "kept", 4, "fp32")
        wire.ok("V.STOREBATCH", "kept_pk", 0, 0, 1, ROW)
        wire.ok("V.STOREBATCH", "kept_pv", 0, 0, 9_000, ROW * 9_000)
        wire.ok("SSM.PREFIX.STORE", "kept", 0, b"state")
        wire.ok("SSM.PREFIX.STORE", "kept", 1, b"")
        wire.ok("KV.PREFIX.SAVE")
        wire.ok("KV.PREFIX.REGISTER", "lost", 4, "fp32")
        wire.ok("V.STOREBATCH", "lost_pk", 0, 0, 9_000, ROW * 9_000)
        wire.ok("V.STOREBATCH", "kept_pk", 0, 0, 1, bytes(16))
    assert not (server.dir / "pion.vstore.wal.0").exists()
    server.restart("--no-wal")
    assert "WAL replayed" not in server.output()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("KV.PREFIX.LOOKUP", "lost") == "MISS"
        assert wire.ask("V.FETCH", "kept_pk", 0, 0) == ROW
        assert wire.ask("V.FETCH", "kept_pv", 0, "RANGE", 0, 9_000) == ROW * 9_000
        assert wire.ask("SSM.PREFIX.FETCH", "kept", 0) == b"state"
        assert wire.ask("SSM.PREFIX.FETCH", "kept", 1) == b""


def test_a_stop_signal_ends_the_server_well_and_keeps_everything(server: RunningServer) -> None:
    server.start()
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp32")
        wire.ok("V.STOREBATCH", "a_pk", 0, 0, 9_000, ROW * 9_000)
        wire.ok("SSM.PREFIX.STORE", "a", 0, b"")
        # a reader that is not reading does not hold it up
        wire.send(request("V.FETCH", "a_pk", 0, "RANGE", 0, 60_000_000))
        assert server.stop() == 0
    server.start()
    assert "V-store WAL replayed: 3 records" in server.output()
    assert "SSM WAL replayed: 1 records" in server.output()
    with Wire.tcp(server.port) as wire:
        assert wire.ask("V.FETCH", "a_pk", 0, "RANGE", 0, 9_000) == ROW * 9_000
        assert wire.ask("SSM.PREFIX.FETCH", "a", 0) == b""
