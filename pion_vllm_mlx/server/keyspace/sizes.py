"""How many bytes a change adds to its key, worked out before it is made.

Counted are the bytes of names, fields, members and values, and a little for each key and
item: what an accountant of tenants needs, not what the allocator does.
"""

from __future__ import annotations

from itertools import islice

from pion_vllm_mlx.server.keyspace.changes import Change, Verb
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.values import SortedSet, Value

#: what a key, and each of its items, costs beside its bytes.
KEY_BYTES = 64
ITEM_BYTES = 16
_SCORE_BYTES = 8


def entry_bytes(key: bytes, value: Value) -> int:
    """What a key counts."""
    total = KEY_BYTES + len(key)
    match value:
        case bytes():
            return total + len(value)
        case dict():
            items = sum(len(name) + len(held) for name, held in value.items())
        case SortedSet():
            items = sum(len(member) + _SCORE_BYTES for member in value.scores)
        case _:
            items = sum(len(item) for item in value)
    return total + items + ITEM_BYTES * len(value)


def growth(data: Data, one: Change) -> int:
    """Bytes by which a change lengthens its key; negative where it shortens it.

    For SET and for changes that end or rename keys the answer is about the new value alone:
    what the keys had counted before is for the caller to know.
    """
    key, *parts = one.parts or (b"",)
    entry = data.entries.get(key)
    value: Value | None = None if entry is None else entry.value
    new = 0 if value is not None else KEY_BYTES + len(key)
    match one.verb:
        case Verb.SET:
            return KEY_BYTES + len(key) + len(parts[0])
        case Verb.APPEND:
            return new + len(parts[0])
        case Verb.HSET | Verb.ZADD:
            return new + _pairs(value, parts, one.verb)
        case Verb.SADD:
            held = value if isinstance(value, set) else set()
            return new + sum(len(m) + ITEM_BYTES for m in set(parts) if m not in held)
        case Verb.RPUSH | Verb.LPUSH:
            return new + sum(len(item) + ITEM_BYTES for item in parts)
        case Verb.HDEL | Verb.ZREM | Verb.SREM | Verb.RPOP | Verb.LPOP:
            return -_removed(value, parts, one.verb)
    return 0


def _pairs(value: Value | None, parts: list[bytes], verb: Verb) -> int:
    """What pairs of HSET or ZADD add to what is there."""
    total = 0
    for name, content in dict(zip(parts[::2], parts[1::2], strict=True)).items():
        if isinstance(value, dict) and verb is Verb.HSET:
            total -= len(name) + len(value[name]) + ITEM_BYTES if name in value else 0
            total += len(name) + len(content) + ITEM_BYTES
        elif isinstance(value, SortedSet) and name in value.scores:
            continue
        else:
            size = _SCORE_BYTES if verb is Verb.ZADD else len(content)
            total += len(name) + size + ITEM_BYTES
    return total


def _removed(value: Value | None, parts: list[bytes], verb: Verb) -> int:
    match value:
        case dict():
            return sum(len(n) + len(value[n]) + ITEM_BYTES for n in parts if n in value)
        case SortedSet():
            return sum(len(m) + _SCORE_BYTES + ITEM_BYTES for m in parts if m in value.scores)
        case set():
            return sum(len(m) + ITEM_BYTES for m in parts if m in value)
        case None | bytes():
            return 0
    items = value if verb is Verb.LPOP else reversed(value)
    return sum(len(item) + ITEM_BYTES for item in islice(items, int(parts[0])))
