"""A reply while it is generated: whether its client still listens, and which words ended it.

And how much of it was thought: a token belongs to what is sent next.

mlx-lm notices that a client has left when it writes to it, and writes nothing while a tool call
goes on, or while the bytes that have come are no whole character yet. It ends a reply at a stop
sequence that is made of whole tokens, of the very ones that it has alone; from inside of others
it cuts the words, or not even that, and goes on.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pion_vllm_mlx.serve.pieces import Thoughts
from pion_vllm_mlx.serve.stops import Stops

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
        self._stops = Stops(self._stop_words)
        self._connection = connection
        self._tail: deque[int] = deque(maxlen=TAIL_TOKENS)
        self._reason: str | None = None
        self.thoughts = Thoughts()

    def follow(self, responses: Iterator[Any], tokenizer: Any) -> Iterator[Any]:
        """The same responses, the text of the last ending before a stop sequence.

        That one says "length": so mlx-lm writes all of the text. Raises ConnectionError once the
        client has left.
        """
        for response in self._cut(responses, tokenizer) if self._stop_words else responses:
            refuse_left(self._connection)
            self._tail.append(response.token)
            self.thoughts.generated += 1
            self._reason = response.finish_reason
            yield response

    def stopped_by(self, tokenizer: Any) -> str | None:
        """The stop sequence that ended it; None where it ended otherwise."""
        if self._stops.word is not None:
            return self._stops.word
        if self._reason != "stop" or not self._stop_words or not self._tail:
            return None
        if self._tail[-1] in tokenizer.eos_token_ids:
            return None
        text = tokenizer.decode(list(self._tail))
        found = [word for word in self._stop_words if text.endswith(word)]
        return max(found, key=len, default=None)

    def reason(self, finish_reason: str | None) -> str | None:
        """Why the reply has ended, where mlx-lm says ``finish_reason``."""
        return "stop" if finish_reason == "length" and self._stops.word else finish_reason

    def _cut(self, responses: Iterator[Any], tokenizer: Any) -> Iterator[Any]:
        """Each response one later, with the text that is certain by then."""
        former = None
        for response in responses:
            stopped = response.finish_reason == "stop"  # its text is not written
            if not stopped:
                text = self._stops.feed(response.text, last=response.finish_reason is not None)
            elif former is not None and response.token in tokenizer.eos_token_ids:
                former = replace(former, text=former.text + self._stops.feed("", last=True))
            if former is not None:
                yield former
            former = response if stopped else replace(response, text=text)
            if self._stops.word is not None:
                former = replace(former, finish_reason="length")
                break
        if former is not None:
            yield former


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
