"""How long one connection may keep the server waiting."""

from __future__ import annotations

import asyncio

from pion_vllm_mlx.server.direct import StreamWriter
from pion_vllm_mlx.server.session import Client, ServerConfig

#: checks that half a long argument may stand still while others wait for its memory: 3 s.
CROWDED_CHECKS = 12


class Patience:
    """Watches one connection, from now on; asked once in a while."""

    def __init__(self, config: ServerConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._seen: tuple[int, int] = (0, 0)
        self._since = asyncio.get_running_loop().time()
        self._waited_until = 0.0
        self._still_at = 0.0
        self._still = 0

    def idle(self, now: float, progress: float, waits: bool) -> bool:
        """Whether nothing was asked, and nothing has come, for the idle time.

        ``waits``: the client waits for the server, for an answer or for room; that is not its
        silence.
        """
        if waits:
            self._waited_until = now
        since = max(progress, self._client.active, self._waited_until)
        return bool(self._config.idle_seconds) and now - since > self._config.idle_seconds

    def in_the_way(self, progress: float, wanted: bool) -> bool:
        """Whether nothing has come for too many checks in a row, all while it was ``wanted``.

        Checks are counted, not seconds: a server that was busy itself has not waited.
        """
        if not wanted or progress != self._still_at:
            self._still_at, self._still = progress, 0
            return False
        self._still += 1
        return self._still >= CROWDED_CHECKS

    def unread(self, now: float, transport: asyncio.Transport, writer: StreamWriter) -> bool:
        """Whether a reply waits for its reader, who has taken none of it for too long."""
        seen = transport.get_write_buffer_size(), writer.sent
        if seen != self._seen or not (seen[0] or writer.sending):
            self._seen, self._since = seen, now
            return False
        return now - self._since > self._config.output_seconds
