"""Stop sequences in the text of a reply, whatever tokens they lie in."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """The text of one reply up to the first of ``words``; ``word`` is that one, once it came."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._held = ""
        self.said = ""
        self.word: str | None = None

    def feed(self, text: str, *, last: bool) -> str:
        """What of the reply is certain once ``text`` has come; all of it where that is the last."""
        self._held += text
        found = [(at, -len(one), one) for one in self._words if (at := self._held.find(one)) >= 0]
        if found:
            end, _, self.word = min(found)
        else:
            end = len(self._held) - (0 if last else self._beginning())
        certain, self._held = self._held[:end], self._held[end:]
        self.said += certain
        return certain

    def _beginning(self) -> int:
        """How many characters at the end may become a stop word."""
        longest = max((len(word) for word in self._words), default=0)
        for count in range(min(longest - 1, len(self._held)), 0, -1):
            if any(word.startswith(self._held[-count:]) for word in self._words):
                return count
        return 0
