"""Server-sent events: written for clients, read from the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: a comment: keeps a connection awake, clients ignore it.
KEEPALIVE = b": keepalive\n\n"
DONE = "[DONE]"
#: of one line of the engine's.
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class Event:
    """One event; ``data`` is sent as JSON, the string ``[DONE]`` as it is."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        """Its bytes on the wire."""
        # json's own escapes: no character of a model's output can end the line.
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {data}\n\n".encode()


def typed(data: dict[str, Any]) -> Event:
    """An event named after its ``type``, as Anthropic's and the Responses API have it."""
    return Event(data, data["type"])


class Decoder:
    """Cuts a stream of bytes into the payloads of its events; a comment is ``None``."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[str | None]:
        """What is complete with ``data``. Raises ``ValueError`` for a line without end."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("a line of the engine's stream is too long")
        for line in lines:
            if line.startswith(b":"):
                yield None
            elif line.startswith(b"data:"):
                yield line[5:].decode("utf-8", "replace").strip()
