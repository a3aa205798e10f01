"""What a start finds damaged is told: once in its log, in INFO, by doctor and by stats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.tools import stats
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire

ROW = bytes(32)
TOLD = ("start_damaged_files", "start_skipped_records", "start_cut_bytes")
CHANGED = "the last record has its length and a wrong checksum"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """Stopped, after it stored prefixes a, b and c, which a snapshot holds, and two keys."""
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        one.start()
        with Wire.tcp(one.port) as wire:
            for name in "abc":
                wire.ok("KV.PREFIX.REGISTER", name, 8, "fp16")
                for side in ("_pk", "_pv"):
                    wire.ok("V.STOREBATCH", name + side, 0, 0, 1, ROW)
            wire.ok("KV.PREFIX.SAVE")
            for key in ("first", "last"):
                wire.ok("SET", key, key)
            # of a session whose Create is in the snapshot alone
            wire.ok("V.STOREBATCH", "a_pk", 0, 1, 1, ROW)
        one.stop()
        yield one
    finally:
        one.stop()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def told(wire: Wire) -> tuple[int, ...]:
    info = wire.info("INFO", "persistence")
    return tuple(int(info[name]) for name in TOLD)


def test_a_repair_tells_what_it_set_aside_and_what_it_kept(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(server.dir / "pion.vstore.0", 100)  # the first session's Create
    flip(server.dir / "pion.wal.0", -1)
    assert cli.main(["doctor", "--dir", str(server.dir)]) == 1
    out = capsys.readouterr().out
    damaged = ["pion.vstore.0 at 32: record 1 is invalid", "pion.vstore.wal.0 record "]
    assert all(words in out for words in [*damaged, f"pion.wal.0: {CHANGED}"])
    with pytest.raises(RuntimeError, match=r"FATAL pion\.vstore\.0 at 32"):
        server.start()
    before, size = len(server.output()), (server.dir / "pion.wal.0").stat().st_size
    server.start("--repair")
    log = server.output()[before:]
    for words in [*damaged, f"pion.wal.0: {CHANGED}"]:
        assert log.count(words) == 1, words
    assert log.count("of its sessions or states those are kept") == 2
    with Wire.tcp(server.port) as wire:
        assert told(wire) == (2, 0, size - (server.dir / "pion.wal.0").stat().st_size)
        assert [wire.ask("KV.PREFIX.LOOKUP", name) for name in "abc"] == ["MISS", "HIT", "HIT"]
        # a prefix of what was acknowledged
        assert (wire.ask("GET", "first"), wire.ask("GET", "last")) == (b"first", None)
    assert stats.main(["--url", f"tcp://127.0.0.1:{server.port}"]) == 0
    assert "2 files were set aside at the start" in capsys.readouterr().out
    server.restart()
    with Wire.tcp(server.port) as wire:
        assert told(wire) == (0, 0, 0)
        assert [wire.ask("KV.PREFIX.LOOKUP", name) for name in "abc"] == ["MISS", "HIT", "HIT"]
    server.stop()
    assert cli.main(["doctor", "--dir", str(server.dir)]) == 0
    assert "set aside by a repair" in capsys.readouterr().out


def test_a_torn_end_is_told_as_such(server: RunningServer) -> None:
    path = server.dir / "pion.vstore.wal.0"
    path.write_bytes(path.read_bytes()[:-3])
    before, size = len(server.output()), path.stat().st_size
    server.start()
    log = server.output()[before:]
    assert log.count("torn end of ") == 1 and CHANGED not in log
    with Wire.tcp(server.port) as wire:
        assert told(wire) == (0, 0, size - path.stat().st_size)
        assert wire.ask("KV.PREFIX.LOOKUP", "a") == "HIT"
