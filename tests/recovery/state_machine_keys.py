"""A small model of the keyspace: what each write of plain keys answers and leaves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.server.wire import Status

OK = Status("OK")
INT64 = range(-(1 << 63), 1 << 63)
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


class Refused(Exception):
    """The model's word for an error reply that contains ``fragment``."""

    def __init__(self, fragment: str) -> None:
        super().__init__(fragment)
        self.fragment = fragment

    def __repr__(self) -> str:
        return f"Refused({self.fragment!r})"


class Scores(dict[bytes, float]):
    """A sorted set."""


@dataclass(frozen=True)
class Moment:
    """Between which unix milliseconds a command ran."""

    earliest: int
    latest: int

    def plus(self, ms: int) -> Moment:
        return Moment(self.earliest + ms, self.latest + ms)

    def meets(self, other: Moment) -> bool:
        return self.earliest <= other.latest and other.earliest <= self.latest


def number(text: bytes) -> int:
    if not _INTEGER.fullmatch(text) or int(text) not in INT64:
        raise Refused("not an integer")
    return int(text)


@dataclass
class Keys:
    """Values by key, and deadlines as intervals of unix milliseconds."""

    values: dict[bytes, Any] = field(default_factory=dict)
    deadlines: dict[bytes, Moment] = field(default_factory=dict)

    def copy(self) -> Keys:
        return copy.deepcopy(self)

    def run(self, words: tuple[bytes, ...], at: Moment) -> Any:
        """The reply of a command; raises Refused, then nothing has changed."""
        name = words[0].upper().decode()
        handler: Callable[..., Any] = getattr(self, "_" + name.lower())
        if name in ("SET", "SETEX", "EXPIRE", "PEXPIRE"):
            return handler(at, *words[1:])
        return handler(*words[1:])

    def settled(self, words: tuple[bytes, ...], at: Moment) -> tuple[bytes, ...]:
        """The command, or one without a comparison that is too close to call."""
        if words[0].upper() in (b"EXPIRE", b"PEXPIRE") and words[1] in self.deadlines:
            unit = 1000 if words[0].upper() == b"EXPIRE" else 1
            near = at.plus(number(words[2]) * unit)
            wide = Moment(near.earliest - 60_000, near.latest + 60_000)
            if wide.meets(self.deadlines[words[1]]):
                return words[:3]
        return words

    # -- helpers -----------------------------------------------------------------

    def _of(self, key: bytes, kind: type) -> Any:
        value = self.values.get(key)
        if value is not None and type(value) is not kind:
            raise Refused("WRONGTYPE")
        return value

    def _remove(self, key: bytes) -> bool:
        self.deadlines.pop(key, None)
        return self.values.pop(key, None) is not None

    def _put(self, key: bytes, value: Any) -> None:
        """Replace a value; an empty collection is no key."""
        if value or isinstance(value, bytes):
            self.values[key] = value
        else:
            self._remove(key)

    def _ends(self, key: bytes, deadline: Moment, now: Moment) -> None:
        if deadline.latest <= now.latest:
            self._remove(key)
        else:
            self.deadlines[key] = deadline

    # -- strings -----------------------------------------------------------------

    def _set(self, at: Moment, key: bytes, value: bytes, *options: bytes) -> Any:
        words = [option.upper() for option in options]
        old = self._of(key, bytes) if b"GET" in words else None
        there = key in self.values
        if (b"NX" in words and there) or (b"XX" in words and not there):
            return old
        kept = self.deadlines.get(key) if b"KEEPTTL" in words else None
        self._remove(key)
        self.values[key] = value
        if kept is not None:
            self.deadlines[key] = kept
        for name, unit in ((b"EX", 1000), (b"PX", 1)):
            if name in words:
                amount = number(words[words.index(name) + 1])
                self._ends(key, at.plus(amount * unit), at)
            if name + b"AT" in words:
                amount = number(words[words.index(name + b"AT") + 1]) * unit
                self._ends(key, Moment(amount, amount), at)
        return old if b"GET" in words else OK

    def _setex(self, at: Moment, key: bytes, seconds: bytes, value: bytes) -> Any:
        return self._set(at, key, value, b"EX", seconds)

    def _setnx(self, key: bytes, value: bytes) -> int:
        if key in self.values:
            return 0
        self.values[key] = value
        return 1

    def _mset(self, *pairs: bytes) -> Status:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._remove(key)
            self.values[key] = value
        return OK

    def _append(self, key: bytes, more: bytes) -> int:
        self.values[key] = (self._of(key, bytes) or b"") + more
        return len(self.values[key])

    def _add(self, key: bytes, by: int) -> int:
        text = self._of(key, bytes)
        total = (0 if text is None else number(text)) + by
        if total not in INT64:
            raise Refused("overflow")
        self.values[key] = b"%d" % total
        return total

    def _incr(self, key: bytes) -> int:
        return self._add(key, 1)

    def _decr(self, key: bytes) -> int:
        return self._add(key, -1)

    def _incrby(self, key: bytes, amount: bytes) -> int:
        return self._add(key, number(amount))

    def _decrby(self, key: bytes, amount: bytes) -> int:
        return self._add(key, -number(amount))

    # -- keys --------------------------------------------------------------------

    def _del(self, *keys: bytes) -> int:
        return sum([self._remove(key) for key in keys])

    _unlink = _del

    def _rename(self, old: bytes, new: bytes) -> Status:
        if old not in self.values:
            raise Refused("no such key")
        if old != new:
            value, deadline = self.values[old], self.deadlines.get(old)
            self._remove(old)
            self._remove(new)
            self.values[new] = value
            if deadline is not None:
                self.deadlines[new] = deadline
        return OK

    def _expire(self, at: Moment, key: bytes, seconds: bytes, *options: bytes) -> int:
        return self._pexpire(at, key, b"%d" % (number(seconds) * 1000), *options)

    def _pexpire(self, at: Moment, key: bytes, ms: bytes, *options: bytes) -> int:
        if key not in self.values:
            return 0
        words = {option.upper() for option in options}
        current, new = self.deadlines.get(key), at.plus(int(ms))
        if (b"NX" in words and current) or (b"XX" in words and not current):
            return 0
        if b"GT" in words and (current is None or new.latest <= current.earliest):
            return 0
        if b"LT" in words and current is not None and new.earliest >= current.latest:
            return 0
        self._ends(key, new, at)
        return 1

    def _persist(self, key: bytes) -> int:
        return int(self.deadlines.pop(key, None) is not None)

    def _flushall(self, *how: bytes) -> Status:
        self.values.clear()
        self.deadlines.clear()
        return OK

    _flushdb = _flushall

    # -- collections -------------------------------------------------------------

    def _hset(self, key: bytes, *pairs: bytes) -> int:
        held = dict(self._of(key, dict) or {})
        before = len(held)
        held.update(zip(pairs[::2], pairs[1::2], strict=True))
        self.values[key] = held
        return len(held) - before

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        held = dict(self._of(key, dict) or {})
        gone = sum(held.pop(name, None) is not None for name in fields)
        self._put(key, held)
        return gone

    def _rpush(self, key: bytes, *items: bytes) -> int:
        self.values[key] = [*(self._of(key, list) or []), *items]
        return len(self.values[key])

    def _lpush(self, key: bytes, *items: bytes) -> int:
        self.values[key] = [*reversed(items), *(self._of(key, list) or [])]
        return len(self.values[key])

    def _pop(self, key: bytes, count: tuple[bytes, ...], left: bool) -> Any:
        held = list(self._of(key, list) or [])
        if not held:
            return None
        many = number(count[0]) if count else 1
        taken = [held.pop(0 if left else -1) for _ in range(min(many, len(held)))]
        self._put(key, held)
        return taken if count else taken[0]

    def _lpop(self, key: bytes, *count: bytes) -> Any:
        return self._pop(key, count, left=True)

    def _rpop(self, key: bytes, *count: bytes) -> Any:
        return self._pop(key, count, left=False)

    def _sadd(self, key: bytes, *members: bytes) -> int:
        held = self._of(key, set) or set()
        self.values[key] = held | set(members)
        return len(self.values[key]) - len(held)

    def _srem(self, key: bytes, *members: bytes) -> int:
        held = self._of(key, set) or set()
        left = held - set(members)
        self._put(key, left)
        return len(held) - len(left)

    def _zadd(self, key: bytes, *words: bytes) -> int:
        held = Scores(self._of(key, Scores) or {})
        upper = [word.upper() for word in words]
        options = {word for word in upper if word in (b"NX", b"XX", b"GT", b"LT", b"CH")}
        rest = words[len(options) :]
        added = changed = 0
        for text, member in zip(rest[::2], rest[1::2], strict=True):
            new, current = float(text), held.get(member)
            if current is None and b"XX" in options:
                continue
            if current is not None and (
                b"NX" in options
                or (b"GT" in options and new <= current)
                or (b"LT" in options and new >= current)
            ):
                continue
            added += current is None
            changed += current is None or current != new
            held[member] = new
        self._put(key, held)
        return changed if b"CH" in options else added

    def _zrem(self, key: bytes, *members: bytes) -> int:
        held = Scores(self._of(key, Scores) or {})
        gone = sum(held.pop(member, None) is not None for member in members)
        self._put(key, held)
        return gone
