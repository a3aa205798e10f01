"""Long arguments come whole and in order, whether a thread or the transport receives them."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import receiving as receiving_module
from pion_vllm_mlx.server.inbound import TURN_BYTES, StreamInbound, WindowPool
from pion_vllm_mlx.server.receiving import LEAST_BYTES, BulkReceiver, SocketSource
from pion_vllm_mlx.wire.resp import Limits, RequestParser
from tests.conftest import RunningServer
from tests.server.wire import Wire, request

MB = 1 << 20
WIDTH = 512
ROW_BYTES = 2 * WIDTH


@dataclass
class Upload:
    """One long argument between a socket and a list of what was consumed."""

    length: int
    fails: Exception | None = None
    unit: int = 1
    consumed: list[bytes] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    def consume(self, window: memoryview) -> None:
        if self.fails is not None:
            raise self.fails
        self.consumed.append(bytes(window))


@dataclass
class Receiving:
    """What receives an upload from ``ours``; its sender has ``peer``."""

    ours: socket.socket
    peer: socket.socket
    parser: RequestParser
    receiver: BulkReceiver
    target: StreamInbound

    async def beside(self) -> bool:
        """Let a thread receive what is there; whether it did."""
        self.receiver.begin(MB, MB)
        began = self.receiver.running
        while self.receiver.running:
            await asyncio.sleep(0.001)
        return began

    async def all_of(self, data: bytes) -> None:
        """Send and receive ``data``, by a thread as far as it likes."""
        sent = asyncio.create_task(asyncio.to_thread(self.peer.sendall, data))
        left = self.parser.open_target[1] - len(data)
        while self.parser.open_target[1] > left:
            if not await self.beside():
                self._as_transport()
                await asyncio.sleep(0.001)
        await sent

    def _as_transport(self) -> None:
        window = self.parser.get_buffer()
        with suppress(BlockingIOError):
            if window is not None:
                self.parser.buffer_updated(self.ours.recv_into(window))


@asynccontextmanager
async def receiving(upload: Upload) -> AsyncIterator[Receiving]:
    """The argument is announced already; at the end nothing holds a window."""
    ours, peer = socket.socketpair()
    pool = WindowPool()
    with ours, peer, ThreadPoolExecutor(2) as threads:
        ours.setblocking(False)
        target = StreamInbound(upload.length, upload.unit, upload.consume, threads, pool, int)

        def came(nbytes: int) -> None:
            upload.told.append(nbytes)
            parser.bulk_received(nbytes)

        parser = RequestParser(Limits(), lambda args, length: target)
        window = parser.get_buffer()
        header = b"*1\r\n$%d\r\n" % upload.length
        assert window is not None
        window[: len(header)] = header
        parser.buffer_updated(len(header))
        yield Receiving(ours, peer, parser, BulkReceiver(parser, lambda: ours, came), target)
        target.release()
        assert pool.held == 0, "windows were not given back"


def test_what_is_there_is_consumed_in_order_and_the_rest_is_left_to_the_transport() -> None:
    async def main() -> None:
        data = random.Random(1).randbytes(5 * MB)
        upload = Upload(len(data))
        async with receiving(upload) as link:
            await link.all_of(data[: 3 * MB + 7])
            await link.all_of(data[3 * MB + 7 :])
            await link.target.wait()
        assert b"".join(upload.consumed) == data
        assert upload.told, "no thread received anything"

    asyncio.run(main())


def test_a_unit_is_never_cut_by_a_window_s_end() -> None:
    async def main() -> None:
        upload = Upload(3 * MB // 771 * 771, unit=771)
        async with receiving(upload) as link:
            await link.all_of(bytes(upload.length))
            await link.target.wait()
        assert len(upload.consumed) > 1
        assert all(len(window) % 771 == 0 for window in upload.consumed)

    asyncio.run(main())


def test_a_thread_lets_others_have_a_turn() -> None:
    async def main() -> None:
        upload = Upload(3 * TURN_BYTES)
        async with receiving(upload) as link:
            await link.all_of(bytes(upload.length))
            await link.target.wait()
        assert max(upload.told) < 2 * TURN_BYTES

    asyncio.run(main())


def test_a_thread_is_not_kept_by_who_goes_on_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is still to come: the transport goes on, and the rest is received as before."""
    monkeypatch.setattr(receiving_module, "PATIENCE_MS", 1000)

    async def main() -> None:
        upload = Upload(4 * MB)
        async with receiving(upload) as link:
            sent = 0
            link.receiver.begin(MB, MB)
            while link.receiver.running and sent < 5000:
                sent += link.peer.send(b"x")
                await asyncio.sleep(0.001)
            assert not link.receiver.running, "it waits for all of the rest"
            await link.all_of(bytes(4 * MB - sent))
            await link.target.wait()
        assert b"".join(upload.consumed) == b"x" * sent + bytes(4 * MB - sent)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [OSError(28, "no space"), CommandError("refused")])
def test_when_consuming_fails_the_rest_is_read_and_the_command_refused(fails: Exception) -> None:
    async def main() -> None:
        upload = Upload(4 * MB, fails)
        async with receiving(upload) as link:
            await link.all_of(bytes(4 * MB))
            with pytest.raises(CommandError):
                await link.target.wait()

    asyncio.run(main())


def test_an_argument_that_is_given_up_while_a_thread_receives_gives_its_window_back() -> None:
    async def main() -> None:
        async with receiving(Upload(64 * MB)) as link:
            link.peer.sendall(bytes(100_000))
            link.receiver.begin(MB, MB)
            assert link.receiver.running
            link.target.release()
            link.receiver.stop()
            while link.receiver.running:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_what_comes_slowly_or_is_short_is_left_to_the_transport() -> None:
    async def main() -> None:
        async with receiving(Upload(4 * MB)) as link:
            link.receiver.begin(1000, MB)
            assert not link.receiver.running
        async with receiving(Upload(LEAST_BYTES - 1)) as link:
            assert not await link.beside()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["nothing more", "closed", "reset"])
def test_a_source_that_ends_says_how_much_it_got(end: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as peer:
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            peer.sendall(b"x" * 1000)
            if end == "closed":
                peer.shutdown(socket.SHUT_WR)
            view = memoryview(bytearray(2000))
            assert SocketSource(ours).fill(view) == 1000
            if end == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, *bytes(7)]))
                peer.close()
                assert SocketSource(ours).fill(view) == 0


# -- a whole server ------------------------------------------------------------


def store(ns: str, layer: int, rows: bytes) -> bytes:
    """V.STOREBATCH of rows as they are stored."""
    count = len(rows) // ROW_BYTES
    return request("V.STOREBATCH", f"{ns}_pk", layer, 0, count, rows, "FMT", "STORED")


def bursts(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """The same bytes in pieces, of which some are a few bytes and some megabytes."""
    at = 0
    while at < len(data):
        size = chance.choice((3, 5_000, 400_000, 3 * MB))
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("budget", [(), ("--disk-budget", "1gb")])
def test_rows_that_come_in_bursts_are_what_was_sent(
    pion_server: RunningServer, budget: tuple[str, ...]
) -> None:
    if budget:
        pion_server.restart(*budget)
    chance = random.Random(2)
    layers = [chance.randbytes(ROW_BYTES * count) for count in (4096, 9001, 1500, 700, 5000)]
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        for turn in range(2):
            commands = b"".join(store("n", layer, rows) for layer, rows in enumerate(layers))
            for piece in bursts(commands, chance):
                wire.send(piece)
                time.sleep(chance.choice((0, 0, 0.004)))
            assert [wire.reply() for _ in layers] == ["OK"] * len(layers), turn
        for layer, rows in enumerate(layers):
            end = len(rows) // ROW_BYTES
            assert wire.ask("V.FETCH", "n_pk", layer, "RANGE", 0, end, "FMT", "STORED") == rows


def test_uploads_that_break_off_leave_their_memory_to_others(pion_server: RunningServer) -> None:
    """More of them than windows: after all are gone a store finds room."""
    rows = random.Random(3).randbytes(ROW_BYTES * 8192)
    with Wire.tcp(pion_server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "n", WIDTH, "fp16")
        command = store("n", 0, rows)
        with ExitStack() as stack:
            for _ in range(40):
                half = stack.enter_context(Wire.tcp(pion_server.port, timeout=0.3))
                with suppress(TimeoutError):  # once no window is left nobody takes it
                    half.send(command[: 3 * MB])
        wire.send(command)
        assert wire.reply() == "OK"
        assert wire.ask("V.FETCH", "n_pk", 0, "RANGE", 0, 8192, "FMT", "STORED") == rows
