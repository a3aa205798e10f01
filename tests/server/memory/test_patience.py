"""A reader is given its time from the first look at it, not from the start of the clock."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from pion_vllm_mlx.server.direct import DirectWriter
from pion_vllm_mlx.server.outbound import Stream, in_memory
from pion_vllm_mlx.server.patience import Patience
from pion_vllm_mlx.server.session import Client, ServerConfig


def test_a_reply_that_has_just_begun_is_not_taken_for_an_unread_one(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=near)
        patience = Patience(ServerConfig(tmp_path, output_seconds=10), Client(1, "", True))
        turns: asyncio.Future[bool] = loop.create_future()
        writer = DirectWriter(transport, lambda turn: turns)
        sending = loop.create_task(writer.send(Stream([in_memory([bytes(1 << 22)])])))
        await asyncio.sleep(0)
        now = loop.time()
        assert writer.sending and writer.sent == 0
        assert not patience.unread(now, transport, writer)
        assert not patience.unread(now + 5, transport, writer)
        assert patience.unread(now + 15, transport, writer)
        turns.set_result(True)
        await sending
        assert not patience.unread(now + 100, transport, writer)
        writer.release()
        transport.abort()
        far.close()

    asyncio.run(main())
