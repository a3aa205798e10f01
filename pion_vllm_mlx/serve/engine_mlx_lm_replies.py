"""A reply while it is generated: whether its client still listens, and which words ended it.

And how much of it was thought: a token belongs to what is sent next.

mlx-lm notices that a client has left when it writes to it, and writes nothing while a tool call
goes on, or while the bytes that have come are no whole character yet.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pion_vllm_mlx.serve.pieces import Thoughts

#: of a reply's last tokens: stop sequences are searched in the text of so many.
TAIL_TOKENS = 256


class Queue(Protocol):
    """Where the items of a reply go on their way to its client."""

    def put(self, item: Any) -> None: ...


class FollowedReply:
    """mlx-lm's responses to one request; used on the thread of its connection."""

    def __init__(self, stop_words: Sequence[str], connection: socket.socket | None) -> None:
        """``stop_words`` are the request's own; without ``connection`` nobody can leave."""
        self._stop_words = [word for word in stop_words if word]
        self._connection = connection
        self._tail: deque[int] = deque(maxlen=TAIL_TOKENS)
        self._reason: str | None = None
        self.thoughts = Thoughts()

    def follow(self, responses: Iterator[Any]) -> Iterator[Any]:
        """The same responses. Raises ConnectionError once the client has left."""
        for response in responses:
            refuse_left(self._connection)
            self._tail.append(response.token)
            self.thoughts.generated += 1
            self._reason = response.finish_reason
            yield response

    def stopped_by(self, tokenizer: Any) -> str | None:
        """The stop sequence that ended it; None where it ended otherwise."""
        if self._reason != "stop" or not self._stop_words or not self._tail:
            return None
        if self._tail[-1] in tokenizer.eos_token_ids:
            return None
        text = tokenizer.decode(list(self._tail))
        found = [word for word in self._stop_words if text.endswith(word)]
        return max(found, key=len, default=None)


def refuse_left(connection: socket.socket | None) -> None:
    """Raises ConnectionError for a connection that its other end has closed."""
    if connection is None:
        return
    try:
        left = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    except OSError:  # reset, or closed by now
        left = True
    if left:
        raise ConnectionAbortedError("the client has left")
