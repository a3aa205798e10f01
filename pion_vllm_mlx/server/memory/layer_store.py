"""Opaque tensors by session and layer; the least recently used session goes first.

A layer is a list of pieces that are never joined: what was received is kept as it
came, and sent from there. Only short pieces are put together.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from pion_vllm_mlx.errors import CommandError

Piece: TypeAlias = bytes | memoryview

MAX_SESSIONS = 256
#: a reply carries a whole layer.
MAX_LAYER_BYTES = 1 << 30
_SHORT_BYTES = 64 << 10


class LayerStore:
    """Storing and fetching count as access."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self.max_sessions = max_sessions
        self.sessions: OrderedDict[bytes, dict[int, list[Piece]]] = OrderedDict()
        self.stored_bytes = 0
        self.evictions = 0

    def store(self, sid: bytes, layer: int, piece: Piece) -> None:
        """Keep ``piece`` itself as the layer's content."""
        layers = self._opened(sid)
        self.stored_bytes += len(piece) - _length(layers.get(layer, []))
        layers[layer] = [piece]

    def extend(self, sid: bytes, layer: int, piece: Piece) -> None:
        """Append to a layer; an absent one begins. Raises CommandError when too long."""
        held = self.sessions.get(sid, {}).get(layer, [])
        if _length(held) + len(piece) > MAX_LAYER_BYTES:
            raise CommandError("a layer has at most 1 GiB")
        layers = self._opened(sid)
        if held and len(held[-1]) + len(piece) <= _SHORT_BYTES:
            # a new list: the old one may be on its way to a reader
            layers[layer] = [*held[:-1], b"".join((held[-1], piece))]
        else:
            layers[layer] = [*held, piece]
        self.stored_bytes += len(piece)

    def fetch(self, sid: bytes, layer: int) -> list[Piece] | None:
        """The pieces of a layer, not to be changed; None when there is none."""
        layers = self.sessions.get(sid)
        if layers is None:
            return None
        self.sessions.move_to_end(sid)
        return layers.get(layer)

    def _opened(self, sid: bytes) -> dict[int, list[Piece]]:
        """The session's layers, now the most recently used."""
        layers = self.sessions.setdefault(sid, {})
        self.sessions.move_to_end(sid)
        while len(self.sessions) > self.max_sessions:
            _, old = self.sessions.popitem(last=False)
            self.stored_bytes -= sum(_length(pieces) for pieces in old.values())
            self.evictions += 1
        return layers


def _length(pieces: list[Piece]) -> int:
    return sum(len(piece) for piece in pieces)
