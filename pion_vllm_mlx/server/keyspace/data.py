"""The keys and the one function that changes them.

``Data.apply`` is the only writer, live and on replay: it asks no clock. A key past
its deadline is invisible to ``find`` and stays until a DELETE is logged. Knows no
client and no file. Times are unix milliseconds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TypeVar

from pion_vllm_mlx.errors import DamagedData, WrongType
from pion_vllm_mlx.server.keyspace.changes import Change, Verb, change
from pion_vllm_mlx.server.keyspace.values import Hash, List, Members, SortedSet, Value, copy_of

V = TypeVar("V", bytes, Hash, List, Members, SortedSet)

#: how many pairs or items of one key a change of a snapshot holds at most.
_SNAPSHOT_PARTS = 1000
#: how many keys a part of them holds at most.
_PART_KEYS = 500


@dataclass(slots=True)
class Entry:
    """What a key holds, when it ends (0: never), and its place in SCAN's order."""

    value: Value
    deadline: int = 0
    serial: int = 0

    def alive(self, now: int) -> bool:
        return not self.deadline or self.deadline > now


class Data:
    """Keys and values. See the module's docstring."""

    def __init__(self) -> None:
        self.entries: MutableMapping[bytes, Entry] = {}
        self._serial = 0
        self._names: list[bytes] = []
        self._serials: list[int] = []
        self._deadlines: list[tuple[int, bytes]] = []
        #: the keys that have a deadline, over or not
        self._timed: set[bytes] = set()
        self._leaving: list[bytes] = []
        self._verbs: dict[Verb, Callable[[tuple[bytes, ...]], None]] = {
            Verb.SET: self._set,
            Verb.DELETE: self._delete,
            Verb.DEADLINE: self._deadline,
            Verb.APPEND: self._append,
            Verb.HSET: self._hset,
            Verb.HDEL: self._hdel,
            Verb.ZADD: self._zadd,
            Verb.ZREM: self._zrem,
            Verb.SADD: self._sadd,
            Verb.SREM: self._srem,
            Verb.RPUSH: self._rpush,
            Verb.LPUSH: self._lpush,
            Verb.RPOP: self._rpop,
            Verb.LPOP: self._lpop,
            Verb.RENAME: self._rename,
            Verb.FLUSH: self._flush,
        }

    # -- reading ---------------------------------------------------------------

    def find(self, key: bytes, now: int) -> Entry | None:
        """The entry of a key that is not past its deadline."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.alive(now) else None

    @property
    def last_place(self) -> int:
        """The place in SCAN's order behind which keys come that are not there yet."""
        return self._serial

    def step(self, cursor: int, count: int) -> tuple[int, int]:
        """The last of up to ``count`` places behind a cursor, and the next cursor, 0 at the end."""
        end = bisect_right(self._serials, cursor) + count
        if end >= len(self._serials):
            return self._serial, 0
        return self._serials[end - 1], self._serials[end - 1]

    def parts(self, cursor: int, last: int) -> Iterator[list[bytes]]:
        """The keys at the places behind a cursor up to the ``last``, a part at a time.

        Between two parts keys may change: one that is there all the while is in one part. So is
        in a scan one that is there during all its steps.
        """
        while cursor < last:
            at = bisect_right(self._serials, cursor)
            end = min(at + _PART_KEYS, bisect_right(self._serials, last))
            if at >= end:
                return
            cursor = self._serials[end - 1]
            yield [
                name
                for name, serial in zip(self._names[at:end], self._serials[at:end], strict=True)
                if name in self.entries and self.entries[name].serial == serial
            ]

    def expired(self, now: int, limit: int) -> list[bytes]:
        """Up to ``limit`` keys past their deadline. They have to be deleted by a change."""
        found: list[bytes] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(found) < limit:
            deadline, key = heapq.heappop(self._deadlines)
            entry = self.entries.get(key)
            if entry is not None and entry.deadline == deadline:
                found.append(key)
        self._leaving = found
        return found

    def look_again(self, keys: Iterable[bytes]) -> None:
        """Keys that ``expired`` gave out could not be deleted."""
        for key in keys:
            if key in self.entries:
                self._note_deadline(key, self.entries[key].deadline)

    def size(self, now: int) -> int:
        """How many keys are not past their deadline."""
        return len(self.entries) - self._num_dead(now)

    def timed(self, now: int) -> int:
        """How many keys have a deadline that is not over."""
        return len(self._timed) - self._num_dead(now)

    def _num_dead(self, now: int) -> int:
        """How many keys are past their deadline; looks at those alone."""
        # what ``expired`` gave out is there until its deletion is logged
        dead = {key for key in self._leaving if key in self.entries}
        dead = {key for key in dead if not self.entries[key].alive(now)}
        places = [0]
        while places:
            place = places.pop()
            if place >= len(self._deadlines) or self._deadlines[place][0] > now:
                continue
            places += (2 * place + 1, 2 * place + 2)
            key = self._deadlines[place][1]
            if key in self.entries and not self.entries[key].alive(now):
                dead.add(key)
        return len(dead)

    def snapshot(self) -> Iterator[Change]:
        """Changes that make an empty keyspace equal to this one."""
        for key, entry in self.entries.items():
            yield from _rebuilding(key, entry.value)
            if entry.deadline:
                yield change(Verb.DEADLINE, key, b"%d" % entry.deadline)

    # -- writing ---------------------------------------------------------------

    def apply(self, one: Change) -> None:
        """Carry out one change. Raises DamagedData when it does not fit."""
        try:
            self._verbs[one.verb](one.parts)
        except (WrongType, ValueError, IndexError, KeyError) as error:
            raise DamagedData(f"{one.verb.name} does not fit: {error}") from error

    def _writable(self, key: bytes) -> Entry | None:
        """The entry of a key, to be changed in place."""
        return self.entries.get(key)

    def _enter(self, key: bytes, entry: Entry) -> None:
        """Give a key that is new a place behind all others."""
        self._serial += 1
        entry.serial = self._serial
        self.entries[key] = entry
        self._names.append(key)
        self._serials.append(self._serial)
        if len(self._names) > 2 * len(self.entries) + 1024:
            self._compact()

    def _note_deadline(self, key: bytes, deadline: int) -> None:
        """Remember when to look at a key; earlier notes about it are passed over."""
        self._timed.add(key)
        heapq.heappush(self._deadlines, (deadline, key))
        if len(self._deadlines) > 2 * len(self.entries) + 1024:
            self._deadlines = [(e.deadline, k) for k, e in self.entries.items() if e.deadline]
            heapq.heapify(self._deadlines)

    def _compact(self) -> None:
        """Forget the places of keys that went."""
        places = sorted((entry.serial, name) for name, entry in self.entries.items())
        self._serials = [serial for serial, _ in places]
        self._names = [name for _, name in places]

    def _held(self, key: bytes, kind: type[V]) -> V:
        """The value of a key, which is made when it is not there."""
        entry = self._writable(key)
        if entry is None:
            entry = Entry(kind())
            self._enter(key, entry)
        return of_kind(entry, kind)

    def _tidy(self, key: bytes) -> None:
        """A key whose last member went is gone."""
        entry = self.entries.get(key)
        if entry is not None and not entry.value:
            del self.entries[key]
            self._timed.discard(key)

    def _set(self, parts: tuple[bytes, ...]) -> None:
        key, value = parts
        entry = self._writable(key)
        if entry is None:
            self._enter(key, Entry(value))
        else:
            entry.value, entry.deadline = value, 0
            self._timed.discard(key)

    def _delete(self, parts: tuple[bytes, ...]) -> None:
        for key in parts:
            self.entries.pop(key, None)
            self._timed.discard(key)

    def _deadline(self, parts: tuple[bytes, ...]) -> None:
        key, text = parts
        entry = self._writable(key)
        if entry is None:
            raise KeyError("a deadline without its key")
        entry.deadline = int(text)
        if entry.deadline:
            self._note_deadline(key, entry.deadline)
        else:
            self._timed.discard(key)

    def _append(self, parts: tuple[bytes, ...]) -> None:
        key, more = parts
        held = self._held(key, bytes)
        self.entries[key].value = held + more

    def _hset(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], dict)
        held.update(zip(parts[1::2], parts[2::2], strict=True))

    def _hdel(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], dict)
        for name in parts[1:]:
            held.pop(name, None)
        self._tidy(parts[0])

    def _zadd(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], SortedSet)
        for member, score in zip(parts[1::2], parts[2::2], strict=True):
            held[member] = float.fromhex(score.decode("ascii"))

    def _zrem(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], SortedSet)
        for member in parts[1:]:
            held.discard(member)
        self._tidy(parts[0])

    def _sadd(self, parts: tuple[bytes, ...]) -> None:
        self._held(parts[0], set).update(parts[1:])

    def _srem(self, parts: tuple[bytes, ...]) -> None:
        self._held(parts[0], set).difference_update(parts[1:])
        self._tidy(parts[0])

    def _rpush(self, parts: tuple[bytes, ...]) -> None:
        self._held(parts[0], deque).extend(parts[1:])

    def _lpush(self, parts: tuple[bytes, ...]) -> None:
        self._held(parts[0], deque).extendleft(parts[1:])

    def _rpop(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], deque)
        for _ in range(int(parts[1])):
            held.pop()
        self._tidy(parts[0])

    def _lpop(self, parts: tuple[bytes, ...]) -> None:
        held = self._held(parts[0], deque)
        for _ in range(int(parts[1])):
            held.popleft()
        self._tidy(parts[0])

    def _rename(self, parts: tuple[bytes, ...]) -> None:
        old, new = parts
        entry = self._writable(old)
        if entry is None:
            raise KeyError("nothing to rename")
        if old == new:
            return
        del self.entries[old]
        self.entries.pop(new, None)
        self._timed -= {old, new}
        self._enter(new, Entry(entry.value))
        if entry.deadline:
            self._deadline((new, b"%d" % entry.deadline))

    def _flush(self, parts: tuple[bytes, ...]) -> None:
        self.entries.clear()
        self._names, self._serials, self._deadlines = [], [], []
        self._timed.clear()


def of_kind(entry: Entry, kind: type[V]) -> V:
    """The value of an entry. Raises WrongType when it is another kind."""
    value = entry.value
    if not isinstance(value, kind):
        raise WrongType("Operation against a key holding the wrong kind of value")
    return value


def _rebuilding(key: bytes, value: Value) -> Iterator[Change]:
    """Changes that make a value anew."""
    parts: list[bytes]
    match value:
        case bytes():
            yield change(Verb.SET, key, value)
            return
        case dict():
            verb, parts = Verb.HSET, [part for pair in value.items() for part in pair]
        case SortedSet():
            verb = Verb.ZADD
            parts = [part for m, s in value.scores.items() for part in (m, s.hex().encode())]
        case set():
            verb, parts = Verb.SADD, list(value)
        case _:
            verb, parts = Verb.RPUSH, list(value)
    for at in range(0, len(parts), _SNAPSHOT_PARTS):
        yield change(verb, key, *parts[at : at + _SNAPSHOT_PARTS])


class _Layer(MutableMapping[bytes, Entry]):
    """A mapping over another one that stays as it is."""

    def __init__(self, below: MutableMapping[bytes, Entry]) -> None:
        self.below = below
        self.own: dict[bytes, Entry | None] = {}
        self.flushed = False

    def __getitem__(self, key: bytes) -> Entry:
        if key in self.own or self.flushed:
            entry = self.own.get(key)
            if entry is None:
                raise KeyError(key)
            return entry
        return self.below[key]

    def __setitem__(self, key: bytes, entry: Entry) -> None:
        self.own[key] = entry

    def __delitem__(self, key: bytes) -> None:
        self[key]
        self.own[key] = None

    def __iter__(self) -> Iterator[bytes]:
        if not self.flushed:
            yield from (key for key in self.below if key not in self.own)
        yield from [key for key, entry in self.own.items() if entry is not None]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        self.own = {}
        self.flushed = True


class Overlay(Data):
    """The keys as they would be after changes that are not made yet."""

    def __init__(self, below: Data, now: int) -> None:
        super().__init__()
        self._now = now
        self._layer = _Layer(below.entries)
        self.entries = self._layer

    def _writable(self, key: bytes) -> Entry | None:
        entry = self.find(key, self._now)
        if entry is not None and key not in self._layer.own:
            entry = Entry(copy_of(entry.value), entry.deadline, entry.serial)
            self.entries[key] = entry
        return entry

    def _enter(self, key: bytes, entry: Entry) -> None:
        self.entries[key] = entry

    def _note_deadline(self, key: bytes, deadline: int) -> None:
        pass

    def step(self, cursor: int, count: int) -> tuple[int, int]:
        return 0, 0

    def parts(self, cursor: int, last: int) -> Iterator[list[bytes]]:
        """Every key in one go, wherever it has its place."""
        yield list(self.entries)

    def size(self, now: int) -> int:
        return sum(1 for entry in self.entries.values() if entry.alive(now))
