"""stats and explain against a real server: their numbers are the server's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord, Run
from pion_vllm_mlx.tools.store_access import duration_text, size_text
from tests.certificates import self_signed
from tests.conftest import RunningServer, free_port_block, running_server
from tests.server.wire import Wire

ROW = bytes(16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("stats") / "data") as one:
        yield one


@pytest.fixture
def url(server: RunningServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


def record(tokens: int) -> bytes:
    """A completion record over two runs of fp32 rows."""
    runs = [Run(0, side, 0, 2, "fp32", "NHD", crc32c(ROW * 2)) for side in ("k", "v")]
    leaf = {"k": 4, "v": 4, "heads": 1, "format": "fp32"}
    identity = {"weights": "abcd", "format": "native", "args": {"layers": 1}}
    slots = [{"class": "KVCache", "slot": 0, "offset": 2}]
    ids = np.arange(100, 100 + tokens, dtype=np.uint32)
    return CompletionRecord(identity, ids, slots, [leaf], runs, prefill_ms=12.4).encode()


def store(wire: Wire, ns: str, *, complete: bool) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp32", "PREFILL_MS", 1500)
    for side in ("_pk", "_pv"):
        wire.ok("V.STOREBATCH", ns + side, 0, 0, 2, ROW * 2)
    if complete:
        wire.ok("SSM.PREFIX.STORE", ns, COMPLETION_LAYER, record(20))


def test_stats_shows_the_receipt_and_what_is_held(
    server: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ask("PION.STATS", "RESET")
        store(wire, "held", complete=True)
        assert [wire.ask("KV.PREFIX.LOOKUP", "held") for _ in range(3)] == ["HIT"] * 3
        assert wire.ask("KV.PREFIX.LOOKUP", "absent") == "MISS"
        wire.ok("SET", "key", "value")
    assert cli.main(["stats", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "3 hits, 1 misses, 75.0 % hits" in out
    assert "4.5 s avoided, 4.5 s of it measured" in out
    assert f"process {server.pid}" in out and "sessions 2 of at most 256" in out
    assert "64 bytes of rows" in out and "keys      1" in out


def test_stats_as_json_has_every_number_and_watch_repeats(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["stats", "--url", url, "--json", "--watch", "0.01", "--count", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert {"kvprefix_hits", "vstore_disk_bytes", "connected_clients"} <= set(lines[0])
    commands = [int(line["total_commands_processed"]) for line in lines]
    assert commands == sorted(set(commands))


def test_a_server_that_is_restarted_is_waited_for_while_it_is_watched(tmp_path: Path) -> None:
    out, error = tmp_path / "out", tmp_path / "error"

    def until(file: Path, text: str) -> None:
        ends_at = time.monotonic() + 60
        while text not in file.read_text():
            assert watching.poll() is None and time.monotonic() < ends_at, error.read_text()
            time.sleep(0.02)

    with running_server(tmp_path / "data") as server, out.open("w") as a, error.open("w") as b:
        command = [sys.executable, "-m", "pion_vllm_mlx", "stats", "--json", "--watch", "0.2"]
        command += ["--url", f"tcp://127.0.0.1:{server.port}", "--count", "1000"]
        watching = subprocess.Popen(command, stdout=a, stderr=b)
        try:
            until(out, f'"worker_process_id": "{server.pid}"')
            server.kill()
            until(error, "waiting for the server")
            server.start()
            until(out, f'"worker_process_id": "{server.pid}"')
            until(error, "answers again")
        finally:
            watching.kill()
            watching.wait()
    assert error.read_text().count("waiting for the server") == 1


def test_a_server_that_never_answered_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    place = f"tcp://127.0.0.1:{free_port_block()}"
    assert cli.main(["stats", "--url", place, "--watch", "0.1"]) == 1
    assert "waiting" not in capsys.readouterr().err


def test_stats_of_a_server_without_prefixes_still_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_server(tmp_path / "data") as server, Wire.tcp(server.port):
        place = f"unix://{server.dir}/s"
        server.restart("--unixsocket", str(server.dir / "s"))
        assert cli.main(["stats", "--url", place]) == 0
    assert f"at {place}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of two workers with a TLS port, a prefix on each, one key on the second."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "data").mkdir(mode=0o700)
    base = free_port_block(6)
    made = self_signed(folder, "server")
    flags = (*made.server_flags(base + 5), "-w", "2", "--independent-workers")
    server = RunningServer(base, folder / "data", flags)
    try:
        server.start()
        for worker in range(2):
            with Wire.tcp(base + 2 + worker) as wire:
                store(wire, f"w{worker}", complete=True)
                assert wire.ask("KV.PREFIX.LOOKUP", f"w{worker}") == "HIT"
        with Wire.tcp(base + 3) as wire:
            wire.ok("SET", "key", "value")
        yield server
    finally:
        server.stop()


def test_stats_of_several_workers_are_added_up(
    several: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"tcp://127.0.0.1:{several.port}"
    assert cli.main(["stats", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "its 2 workers added up" in out and "2 hits, 0 misses" in out
    assert "prefixes  2 of" in out and "sessions 4 of" in out and "keys      1" in out
    assert "3.0 s avoided" in out and "128 bytes of rows" in out
    assert cli.main(["stats", "--url", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stats_scope"] == "server" and "worker_id" not in found


def test_stats_that_reach_one_worker_of_several_say_which(
    several: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = several.dir.parent / "server.crt"
    url = f"tls://localhost:{several.port + 5}"
    assert cli.main(["stats", "--url", url, "--tls-ca-file", str(ca)]) == 0
    out = capsys.readouterr().out
    assert "of 0 to 1 alone (a worker's own port has no TLS" in out and "1 hits, 0" in out


@pytest.mark.parametrize("workers", [1, 2])
def test_stats_are_refused_to_a_tenant_in_the_server_s_words(
    tmp_path: Path,
    workers: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    flags = ["--requirepass", "adminpw", "--tenant", "team=s3cret", "--bind", "127.0.0.1"]
    flags += ["-w", str(workers), "--independent-workers"]
    server = RunningServer(free_port_block(5), tmp_path / "data", flags)
    try:
        server.start()
        monkeypatch.setenv("PION_REQUIREPASS", "s3cret")
        place = f"tcp://team@127.0.0.1:{server.port}"
        for more in ([], ["--json"], ["--watch"]):
            assert cli.main(["stats", "--url", place, *more]) == 1
            out, error = capsys.readouterr()
            assert out == "" and "'kv.prefix.info' is not allowed for tenant 'team'" in error
        monkeypatch.setenv("PION_REQUIREPASS", "adminpw")
        assert cli.main(["stats", "--url", f"tcp://127.0.0.1:{server.port}"]) == 0
    finally:
        server.stop()


def test_a_reader_that_stops_early_ends_a_tool_without_a_word(url: str) -> None:
    command = [sys.executable, "-m", "pion_vllm_mlx", "stats", "--url", url]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_missing_password_is_asked_for_in_words_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PION_REQUIREPASS", raising=False)
    (tmp_path / "data").mkdir(mode=0o700)
    server = RunningServer(free_port_block(), tmp_path / "data", ("--requirepass", "pw"))
    try:
        server.start()
        for command in (["stats"], ["explain", "x"]):
            assert cli.main([*command, "--url", f"tcp://127.0.0.1:{server.port}"]) == 1
            err = capsys.readouterr().err
            assert "required; give the server's password in PION_REQUIREPASS" in err
            assert "password=" not in err
    finally:
        server.stop()


def test_explain_of_sessions_without_a_prefix_says_that_the_client_prefills(
    server: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "bare", 4, "fp32")
    assert cli.main(["explain", "bare", "--url", url]) == 1
    out = capsys.readouterr().out
    assert "bare: registered, but not a whole prefix" in out and "the client prefills" in out
    assert "is a hit" not in out


@pytest.mark.parametrize("command", [["stats"], ["explain", "x"]])
def test_no_server_is_one_line_that_says_what_helps(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--url", "tcp://127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert 'start "pion-server --kvcache"' in err and len(err.splitlines()) == 1
    # looking at a folder starts no server in it
    assert cli.main([*command, "--url", f"embedded://{tmp_path}"]) == 1
    assert "no server runs on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_explain_says_why_and_exits_by_it(
    server: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Wire.tcp(server.port) as wire:
        store(wire, "whole", complete=True)
        store(wire, "half", complete=False)
        wire.ask("PION.STATS", "RESET")
    assert cli.main(["explain", "whole", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "whole: lookup is a hit" in out and "complete: 20 tokens, 1 KVCache" in out
    assert "ids      100 101" in out and "weights: abcd" in out and "2 runs fp32" in out
    assert cli.main(["explain", "half", "--url", url]) == 1
    assert "no completion record" in capsys.readouterr().out
    assert cli.main(["explain", "nobody", "--url", url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["reason"]) == ("miss", "never registered here")
    with Wire.tcp(server.port) as wire:
        receipt = wire.info("INFO", "pion")
        assert receipt["kvprefix_hits"] == receipt["kvprefix_misses"] == "0"


def test_explain_names_a_damaged_record(
    server: RunningServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Wire.tcp(server.port) as wire:
        store(wire, "spoilt", complete=False)
        wire.ok("SSM.PREFIX.STORE", "spoilt", COMPLETION_LAYER, record(20)[:-1] + b"x")
    assert cli.main(["explain", "spoilt", "--url", url]) == 1
    assert "checksum does not match" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (12_340_000, "12.3 MB")],
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (600, "10 min"), (11_100, "3 h 5 min"), (400_000, "4 d 15 h")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    "words",
    [
        *(["--watch", text] for text in ("-1", "nan", "inf", "0", "1e300", "x")),
        *(["--watch", "1", "--count", text] for text in ("0", "-1", "x", "1.5")),
        *(["--deadline", text] for text in ("nan", "inf", "-1", "0", "1e300")),
    ],
)
def test_a_number_that_means_nothing_is_wrong_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["stats", "--url", "tcp://127.0.0.1:1", *words])
    assert ended.value.code == 2
    assert f"{words[-1]!r} is no number of" in capsys.readouterr().err
