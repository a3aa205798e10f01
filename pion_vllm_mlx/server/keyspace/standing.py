"""What a log says by itself, when the snapshot that it goes on from is lost."""

from __future__ import annotations

from pion_vllm_mlx.server.keyspace.changes import Change, Verb, change


class Standing:
    """Passes the changes of keys whose whole value the log has.

    Those are keys that were set, deleted, or flushed away since the log's beginning. What is
    added to or taken from any other key makes no value that ever was: it stays away.
    """

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._all = False

    def passed(self, one: Change) -> Change | None:
        """The change, what is left of it, or None. Changes come in the order of the log."""
        match one.verb:
            case Verb.FLUSH:
                self._all = True
            case Verb.SET | Verb.DELETE:
                self._known.update(one.keys)
            case Verb.RENAME:
                return self._renamed(one)
            case _:
                return one if self._knows(one.keys[0]) else None
        return one

    def _knows(self, key: bytes) -> bool:
        return self._all or key in self._known

    def _renamed(self, one: Change) -> Change | None:
        """The first name is free from then on, whatever it held."""
        source, target = one.keys
        if self._knows(source):
            self._known.add(target)
            return one
        if source == target:
            return None
        self._known.discard(target)
        self._known.add(source)
        return change(Verb.DELETE, target)
