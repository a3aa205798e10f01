"""All that a client can read of a server, to be held against the model."""

from __future__ import annotations

import time
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.recovery.state_machine_commands import NAMESPACES, SIDS, STATE_SIDS, World
from tests.recovery.state_machine_keys import Moment, Scores
from tests.recovery.state_machine_memory import Memory
from tests.server.wire import Wire

STATE_LAYERS = (0, 1, 65535)


@dataclass
class Seen:
    """One observation; ``deadlines`` as intervals of unix milliseconds."""

    prefixes: dict[Any, Any]
    keys: dict[bytes, Any]
    deadlines: dict[bytes, Moment]
    counts: dict[str, int] = field(default_factory=dict)

    def difference(self, world: World) -> str:
        """What does not fit, in words; empty when everything does."""
        expected = world.prefixes.content()
        for key in self.prefixes.keys() | expected.keys():
            seen, wanted = self.prefixes.get(key), expected.get(key)
            if seen != wanted:
                return f"{key}: {str(seen)[:300]} instead of {str(wanted)[:300]}"
        for name in self.keys.keys() | world.keys.values.keys():
            seen, wanted = self.keys.get(name), world.keys.values.get(name)
            if seen != wanted or type(seen) is not type(wanted):
                return f"{name!r}: {str(seen)[:300]} instead of {str(wanted)[:300]}"
        ends = world.keys.deadlines
        if set(self.deadlines) != set(ends):
            return f"deadlines: {self.deadlines} instead of {ends}"
        for name, end in self.deadlines.items():
            if not end.meets(ends[name]):
                return f"deadline of {name!r}: {end} instead of {ends[name]}"
        return self._counts_differ(world)

    def _counts_differ(self, world: World) -> str:
        sides = world.prefixes.sides
        spare = 2 * len(world.prefixes.overdue)
        if not len(sides) <= self.counts["vstore_sessions"] <= len(sides) + spare:
            return f"{self.counts['vstore_sessions']} sessions instead of {len(sides)}"
        if self.counts["keys"] != len(world.keys.values):
            return f"{self.counts['keys']} keys instead of {len(world.keys.values)}"
        memory = world.memory
        sizes: dict[str, Sized] = {
            "slots": memory.slots,
            "blobs": memory.blobs,
            "indices": memory.indices,
            "resident": memory.resident,
        }
        for name, held in sizes.items():
            if self.counts[name] != len(held):
                return f"{self.counts[name]} {name} instead of {len(held)}"
        return ""


def observe(wire: Wire) -> Seen:
    """Read everything, in a few round trips."""
    prefixes = {**_sessions(wire), **_states(wire), **_namespaces(wire)}
    keys, deadlines = _keys(wire)
    info = wire.info("KV.PREFIX.INFO")
    counts = {
        "vstore_sessions": int(info["vstore_sessions"]),
        "keys": wire.ask("DBSIZE"),
        "slots": int(wire.info("STATE.INFO")["sessions"]),
        "blobs": int(wire.info("KV.INFO")["entries"]),
        "indices": int(wire.info("ATTEND.INFO")["sessions"]),
        "resident": int(info["sdpa_warm"]),
    }
    return Seen(prefixes, keys, deadlines, counts)


def _sessions(wire: Wire) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    fetches = []
    for sid, text in zip(SIDS, wire.together(*[("V.INFO", sid) for sid in SIDS]), strict=True):
        if text is None:
            continue
        lines = [line.rpartition(":") for line in text.decode().split("\r\n")]
        fields = {name: value for name, colon, value in lines if colon}
        counts = {
            int(name.split("_")[1]): int(value)
            for name, value in fields.items()
            if name.startswith("layer_") and name.endswith("_tokens")
        }
        found["session", sid] = (int(fields["dim"]), counts, int(fields["snapshots"]))
        fetches += [(sid, layer, count) for layer, count in counts.items()]
    stored = wire.together(
        *[
            ("V.FETCH", sid, layer, "RANGE", 0, max(1, count), "FMT", "STORED")
            for sid, layer, count in fetches
        ]
    )
    for (sid, layer, count), data in zip(fetches, stored, strict=True):
        assert isinstance(data, bytes), (sid, layer, data)
        found["rows", sid, layer] = data if count else b""
    return found


def _states(wire: Wire) -> dict[Any, Any]:
    places = [(sid, layer) for sid in STATE_SIDS for layer in STATE_LAYERS]
    blobs = wire.together(*[("SSM.PREFIX.FETCH", *place) for place in places])
    pairs = zip(places, blobs, strict=True)
    return {("state", *place): blob for place, blob in pairs if blob is not None}


def _namespaces(wire: Wire) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    commands = [
        (name, ns) for ns in NAMESPACES for name in ("KV.PREFIX.LOOKUP", "KV.PREFIX.BLOCKS")
    ]
    for (name, ns), reply in zip(commands, wire.together(*commands), strict=True):
        if reply == "HIT":
            found["hit", ns] = True
        elif name.endswith("BLOCKS") and reply != "UNKNOWN":
            found["blocks", ns] = reply
        else:
            assert reply in ("MISS", "UNKNOWN"), (name, ns, reply)
    return found


_READ = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "list": ("LRANGE", 0, -1),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
}


def _keys(wire: Wire) -> tuple[dict[bytes, Any], dict[bytes, Moment]]:
    names = wire.ask("KEYS", "*")
    kinds = wire.together(*[("TYPE", name) for name in names])
    reads = [
        (_READ[kind][0], name, *_READ[kind][1:]) for name, kind in zip(names, kinds, strict=True)
    ]
    found = {
        name: _value(kind, value)
        for name, kind, value in zip(names, kinds, wire.together(*reads), strict=True)
    }
    before = int(time.time() * 1000) - 2
    left = wire.together(*[("PTTL", name) for name in names])
    after = int(time.time() * 1000) + 2
    ends = {
        name: Moment(before + ms, after + ms)
        for name, ms in zip(names, left, strict=True)
        if ms >= 0
    }
    return found, ends


def _value(kind: str, value: Any) -> Any:
    """In the model's terms: dict, set, list, Scores."""
    match kind:
        case "hash":
            return dict(zip(value[::2], value[1::2], strict=True))
        case "set":
            return set(value)
        case "zset":
            return Scores((m, float(s)) for m, s in zip(value[::2], value[1::2], strict=True))
    return value


def same_index(wire: Wire, memory: Memory, sid: bytes) -> None:
    """Each layer of an index answers the nearest values."""
    index = memory.indices.get(sid)
    for layer, rows in index.layers.items() if index else ():
        assert index is not None
        query = np.asarray(rows[0][0]) + np.float32(0.25)
        for k in (1, 3, len(rows) + 5):
            reply = wire.ask("ATTEND.QUERY", sid, layer, k, query.astype("<f4").tobytes())
            assert reply == index.nearest(layer, k, query), (sid, layer, k)
