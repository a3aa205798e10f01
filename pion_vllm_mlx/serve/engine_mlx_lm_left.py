"""Requests whose client left before its reply began: out of the prefill at its next step.

mlx-lm learns that a client has left when it writes to it, which for a reply that is not streamed
is behind the prefill; and it looks whether a request was given up right after it has told how far
its prompt is.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any

from pion_vllm_mlx.serve.engine_mlx_lm_replies import Queue, refuse_left

server: Any = importlib.import_module("mlx_lm.server")

_NAME = "pion_connection"


def fasten(request: Any, connection: socket.socket | None) -> None:
    """Sends the connection of its client along with a request."""
    setattr(request, _NAME, connection)


def connection_of(request: Any) -> socket.socket | None:
    """What was sent along; None where nobody can leave."""
    connection = vars(request).get(_NAME)
    return connection if isinstance(connection, socket.socket) else None


class Watched:
    """The queue of a request, which is given up when its client is found to have left."""

    def __init__(
        self, queue: Queue, connection: socket.socket | None, alone: Callable[[], bool]
    ) -> None:
        """``alone``: whether the request is served by itself now, and not in a batch."""
        self._queue = queue
        self._connection = connection
        self._alone = alone
        self._context: Any = None

    def put(self, item: Any) -> None:
        """As the queue's own. Raises ConnectionError for a prompt that is prefilled alone."""
        if isinstance(item, server.GenerationContext):
            self._context = item
        elif isinstance(item, tuple) and self._context is not None:  # how far the prompt is
            try:
                refuse_left(self._connection)
            except ConnectionError as error:
                if self._alone():
                    raise  # which mlx-lm tells the waiting thread
                self._context.stop()
                item = error
        self._queue.put(item)
