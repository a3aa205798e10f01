"""What this process knows to be stored already, without asking.

``keep`` has two milliseconds: it must not ask the server what is new. Matches and keeps of
the latest prompts are remembered. What is remembered and no longer true (evicted, or deleted
by others) makes a store that is lost: the prompt is then forgotten, and the next one brings all.
Where nothing new would be stored, that is found out by ``recheck``.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import FIRST_TOKENS, common_tokens
from pion_vllm_mlx.cache.lineage.capture import Since

MOST_PROMPTS = 16
TOUCH_SECONDS = 10.0
"""So often at most a conversation that memory serves is marked as used in the store, and what
was measured is noted."""

_MOST_NAMES = 1024


@dataclass(frozen=True)
class _Entry:
    """``rows`` and ``fresh`` as in Since; ``points`` are lengths whose state is stored.

    ``head`` are the first tokens, as bytes.
    """

    tokens: TokenIds
    head: bytes
    rows: int
    fresh: int
    points: frozenset[int]


class Recent:
    """The latest prompts of one model. Thread-safe; who reads waits for nobody.

    What is known is replaced as a whole: the thread that generates is not to wait for a lock
    that another one holds while that waits for the interpreter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: tuple[_Entry, ...] = ()

    def note(self, tokens: TokenIds, rows: int, fresh: int, point: int | None) -> None:
        """``rows`` tokens of a prompt are stored, and the state at ``point``."""

        def noted(known: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
            head = _head(tokens)
            points = {point} if point is not None else set()
            stay = []
            for entry in known:
                shared = _shared(entry, head, tokens)
                points |= {length for length in entry.points if length <= shared}
                if shared < entry.tokens.size:
                    stay.append(entry)
            stay.append(_Entry(tokens, head, rows, fresh, frozenset(points)))
            return tuple(stay[-MOST_PROMPTS:])

        self._replace(noted)

    def since(self, tokens: TokenIds) -> tuple[Since, bool]:
        """From where on the caches of ``tokens`` are new, and whether their state is known."""
        rows, fresh, known = 0, 0, False
        head = _head(tokens)
        for entry in self._entries:
            shared = _shared(entry, head, tokens)
            rows = max(rows, min(entry.rows, shared))
            if shared == min(entry.tokens.size, tokens.size):  # the same request, by its last
                fresh = min(entry.fresh, shared)
            known = known or (shared == tokens.size and tokens.size in entry.points)
        return Since(rows, min(rows, fresh)), known

    def forget(self, tokens: TokenIds) -> None:
        """Nothing is known any more of what begins like this prompt."""
        first = tokens[:FIRST_TOKENS]
        self._replace(
            lambda known: tuple(
                one for one in known if not common_tokens(one.tokens[:FIRST_TOKENS], first)
            )
        )

    def clear(self) -> None:
        self._replace(lambda known: ())

    def _replace(self, change: Callable[[tuple[_Entry, ...]], tuple[_Entry, ...]]) -> None:
        """What is known becomes what ``change`` makes of it; the lock is held for a moment."""
        done = False
        while not done:
            known = self._entries
            changed = change(known)
            with self._lock:
                done = self._entries is known
                if done:
                    self._entries = changed


class Coming:
    """Prompts that are on their way to the store, as long as there is what has them written.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: weakref.WeakKeyDictionary[object, TokenIds] = weakref.WeakKeyDictionary()

    def expect(self, what: object, tokens: TokenIds) -> None:
        """``what`` goes once they are written, or will not be."""
        with self._lock:
            self._prompts[what] = tokens

    def common(self, tokens: TokenIds) -> int:
        """The most tokens that one of them has in common with a prompt."""
        with self._lock:
            prompts = list(self._prompts.values())
        common = max((common_tokens(one, tokens) for one in prompts), default=0)
        return common if common >= FIRST_TOKENS else 0


class Rarely:
    """Lets something through for each name once in ``seconds``. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[str, float] = {}

    def due(self, name: str) -> bool:
        """Whether it is time for a name again; then it counts as done."""
        now = time.monotonic()
        if now - self._last.get(name, -math.inf) < self._seconds:
            return False
        self._last.pop(name, None)
        self._last[name] = now
        if len(self._last) > _MOST_NAMES:
            del self._last[next(iter(self._last))]
        return True


def _head(tokens: TokenIds) -> bytes:
    return tokens[:FIRST_TOKENS].tobytes()


def _shared(entry: _Entry, head: bytes, tokens: TokenIds) -> int:
    """``common_tokens``; 0 for prompts of different trees: nothing is found by fewer tokens."""
    if entry.tokens.size < FIRST_TOKENS or entry.head != head:
        return 0
    return common_tokens(entry.tokens, tokens)
