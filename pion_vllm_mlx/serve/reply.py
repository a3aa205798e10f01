"""One reply of the engine, as an API's events or as its whole body.

Each API has a class: it is fed every chunk, gives the events a streaming client gets, and can
say the whole afterwards, so that a client that streams and one that does not are told the same.
No class here does any I/O.
"""

from __future__ import annotations

import abc

from pion_vllm_mlx.serve.api_errors import ApiError, Shape
from pion_vllm_mlx.serve.checks import Json
from pion_vllm_mlx.serve.pieces import ChatReader, Outcome, Piece
from pion_vllm_mlx.serve.sse import KEEPALIVE, Event


class Reply(abc.ABC):
    """How one API tells what the engine sends; every method may be called once, ``feed`` often.

    ``shape`` is that of its errors; ``model`` is the name to answer under.
    """

    shape = Shape.OPENAI

    def __init__(self, model: str) -> None:
        self.model = model
        self.reader = ChatReader()

    @property
    def outcome(self) -> Outcome:
        """How it ended, as far as it has come."""
        return self.reader.outcome

    def start(self) -> list[Event]:
        """The events before the first chunk."""
        return []

    def feed(self, chunk: Json) -> list[Event]:
        """The events of a chunk."""
        return [event for piece in self.reader.feed(chunk) for event in self.piece(piece)]

    def end(self) -> list[Event]:
        """The events after the last chunk."""
        events = [event for piece in self.reader.flush() for event in self.piece(piece)]
        return events + self.finish()

    def keepalive(self) -> bytes:
        """What keeps a streaming client waiting while the prompt is prefilled."""
        return KEEPALIVE

    @abc.abstractmethod
    def piece(self, piece: Piece) -> list[Event]:
        """The events of one piece."""

    @abc.abstractmethod
    def finish(self) -> list[Event]:
        """The events that end the stream."""

    @abc.abstractmethod
    def whole(self) -> Json:
        """The body for a client that does not stream; after ``end``."""

    @abc.abstractmethod
    def failure(self, error: ApiError) -> list[Event]:
        """The events that end a stream that failed after it began."""
