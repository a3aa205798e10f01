"""Nothing piles up: files, descriptors, bytes in flight, after many cycles of everything."""

from __future__ import annotations

from tests.hostile.conftest import StartServer
from tests.hostile.watching import (
    anonymous_bytes,
    eventually,
    needs_proc,
    only_client,
    open_files,
    segment_files,
)
from tests.server.wire import Wire, request, settle

WIDTH = 256
ROWS = 4_000  # 2 MB of fp16
BLOB = bytes(ROWS * WIDTH * 2)


def one_cycle(port: int, wire: Wire, number: int) -> None:
    """Store in every way, read in every way, refuse, abort, drop."""
    ns = f"cycle{number % 3}"
    sid = ns + "_pk"
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "HEADS", 4)
    wire.ok("V.STOREBATCH", sid, 0, 0, ROWS, BLOB, "FMT", "F16")
    wire.ok("V.STOREBATCH", sid, 0, 10, 5, BLOB[: 5 * WIDTH * 2], "FMT", "F16")
    wire.ok("V.STOREBATCH", ns + "_pv", 0, 0, ROWS // 2, BLOB)
    wire.ok("SSM.PREFIX.STORE", ns, 0, BLOB)
    wire.ok("SSM.PREFIX.STORE", ns, 0, b"short")
    assert "checksum" in wire.ask("V.STOREBATCH", sid, 0, 0, ROWS, BLOB, "FMT", "F16", "CRC", 1)
    assert wire.ask("V.FETCH", sid, 0, "RANGE", 0, 9) is not None
    assert wire.ask("V.EXPORT", sid, ns + "_pv", 0, 90, 1, 4, WIDTH // 4) is not None
    assert isinstance(wire.ask("KV.PREFIX.MAP", ns), bytes)
    with Wire.tcp(port) as leaver:
        leaver.send(request("V.STOREBATCH", sid, 1, 0, ROWS, BLOB, "FMT", "F16")[:-100])
    with Wire.tcp(port) as reader:
        reader.send(request("V.FETCH", sid, "BATCH", 0, ROWS) * 4)
        assert reader.sock.recv(100)
    if number % 7 == 3:
        wire.ok("KV.PREFIX.SAVE")
    assert wire.ask("KV.PREFIX.DROP", ns) == 1


@needs_proc
def test_many_cycles_leave_nothing_behind(start_server: StartServer) -> None:
    server = start_server()
    with Wire.tcp(server.port) as wire:

        def quiet() -> None:
            assert eventually(lambda: only_client(wire))
            settle(wire)
            assert eventually(lambda: segment_files(server) == [])

        for number in range(8):
            one_cycle(server.port, wire, number)
        quiet()
        files, memory = open_files(server), anonymous_bytes(server)
        for number in range(40):
            one_cycle(server.port, wire, number)
        quiet()
        assert eventually(lambda: open_files(server) <= files), (open_files(server), files)
        assert anonymous_bytes(server) < memory + (32 << 20)
        assert not list((server.dir / "pion-export").iterdir())
        info = wire.info("KV.PREFIX.INFO")
        assert info["vstore_sessions"] == info["vstore_bytes"] == info["vstore_disk_bytes"] == "0"
        assert "internal error" not in server.output()
        assert "Traceback" not in server.output()
