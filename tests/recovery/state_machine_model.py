"""A small model of the V-store and of recurrent states: dictionaries of rows and blobs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from crc32c import crc32c

from pion_vllm_mlx.formats import get_format, resolve
from tests.recovery.state_machine_keys import OK, Refused

#: width, format, heads
Spec: TypeAlias = tuple[int, str, int]
SIDES = (b"_pk", b"_pv")
MAX_PINNED = 8
_FLOATS = ("fp16", "bf16", "fp32")


def group_of(sid: bytes) -> bytes:
    return sid[:-3] if sid.endswith(SIDES) else sid


@dataclass
class Layer:
    """Rows of one layer; a row that is missing below ``count`` reads as zeros."""

    spec: Spec
    count: int = 0
    rows: dict[int, bytes] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int:
        return get_format(self.spec[1]).row_bytes(self.spec[0])

    def stored(self, start: int, end: int) -> bytes:
        zeros = bytes(self.row_bytes)
        return b"".join(self.rows.get(n, zeros) for n in range(start, end))

    def floats(self, start: int, end: int) -> bytes:
        wire = np.frombuffer(self.stored(start, end), np.uint8).reshape(end - start, -1)
        return get_format(self.spec[1]).decode(wire).tobytes()


@dataclass
class Side:
    """A session."""

    dim: int
    requested: str
    heads: int
    specs: dict[int, Spec]
    layers: dict[int, Layer] = field(default_factory=dict)
    pinned: bool = False
    blocks: bytes | None = None
    points: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def schema(self) -> tuple[Any, ...]:
        return self.dim, self.requested, self.heads, self.specs

    def spec(self, layer: int) -> Spec:
        if not 0 <= layer <= 1023:
            raise Refused("layer out of range")
        if layer in self.specs:
            return self.specs[layer]
        if not self.dim:
            raise Refused("no dimension")
        name = resolve("int8" if self.specs else self.requested, self.dim).name
        return self.dim, name, self.heads


@dataclass(frozen=True)
class RowsSent:
    """One V.STOREBATCH: ``wire`` is what travels, ``rows`` what has to be stored."""

    sid: bytes
    layer: int
    start: int
    rows: tuple[bytes, ...]
    wire: bytes
    options: tuple[bytes, ...]


@dataclass
class Prefixes:
    """Sessions by id, states by sid and layer.

    ``overdue``: namespaces past their deadline, whose sessions the server may still count.
    """

    sides: dict[bytes, Side] = field(default_factory=dict)
    states: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    overdue: set[bytes] = field(default_factory=set)

    def copy(self) -> Prefixes:
        return copy.deepcopy(self)

    def restarted(self) -> None:
        """What is in memory only is gone."""
        for side in self.sides.values():
            side.points.clear()

    def of_namespace(self, namespace: bytes) -> list[Side]:
        return [self.sides[namespace + s] for s in SIDES if namespace + s in self.sides]

    # -- what commands do --------------------------------------------------------

    def register(self, namespace: bytes, sides: Sequence[Side], blocks: bytes | None) -> Any:
        needed = []
        for suffix, new in zip(SIDES, sides, strict=True):
            old = self.sides.get(namespace + suffix)
            if old is not None and old.schema == new.schema:
                continue
            if old is not None and old.layers:
                raise Refused("already exists with a different format")
            needed.append((namespace + suffix, new))
        if needed:
            self.overdue.discard(namespace)
        self.sides.update((sid, copy.deepcopy(side)) for sid, side in needed)
        if blocks is not None:
            self.sides[namespace + b"_pk"].blocks = blocks
        return OK

    def create(self, sid: bytes, new: Side) -> None:
        old = self.sides.get(sid)
        if old is not None and old.schema == new.schema:
            return
        if old is not None and old.layers:
            raise Refused("already exists with a different schema")
        self.overdue.discard(group_of(sid))
        self.sides[sid] = copy.deepcopy(new)

    def store(self, sent: RowsSent) -> Any:
        side = self._side(sent.sid)
        spec = side.spec(sent.layer)
        if sent.rows:
            layer = side.layers.setdefault(sent.layer, Layer(spec))
            layer.rows.update(enumerate(sent.rows, sent.start))
            layer.count = max(layer.count, sent.start + len(sent.rows))
        return OK

    def _side(self, sid: bytes) -> Side:
        if sid not in self.sides:
            raise Refused("session not found")
        return self.sides[sid]

    def drop(self, namespaces: Iterable[bytes]) -> int:
        held = 0
        for namespace in dict.fromkeys(namespaces):
            held += bool(self.of_namespace(namespace))
            for suffix in SIDES:
                self.sides.pop(namespace + suffix, None)
            self.drop_namespace_states(namespace)
            self.overdue.discard(namespace)
        return held

    def drop_sessions(self, sids: Iterable[bytes]) -> int:
        there = [sid for sid in dict.fromkeys(sids) if sid in self.sides]
        for sid in there:
            del self.sides[sid]
            if group_of(sid) != sid:
                self.drop_namespace_states(group_of(sid))
        return len(there)

    def drop_namespace_states(self, namespace: bytes) -> None:
        for key in [key for key in self.states if belongs(key[0], namespace)]:
            del self.states[key]

    def expire_now(self, namespace: bytes) -> int:
        sides = self.of_namespace(namespace)
        if sides:
            for suffix in SIDES:
                self.sides.pop(namespace + suffix, None)
            self.drop_namespace_states(namespace)
            self.overdue.add(namespace)
        return int(bool(sides))

    def pin(self, namespace: bytes, pinned: bool) -> int:
        sides = self.of_namespace(namespace)
        new = [side for side in sides if not side.pinned]
        if pinned and new:
            held = sum(side.pinned for side in self.sides.values())
            if held + len(new) > MAX_PINNED:
                raise Refused("pinned prefixes may take")
        for side in sides:
            side.pinned = pinned
        return int(bool(sides))

    def snapshot(self, sid: bytes, point: int) -> None:
        side = self._side(sid)
        if len(side.points) >= 16:
            raise Refused("no free snapshot slot")
        side.points[point] = {n: layer.count for n, layer in side.layers.items()}

    def restore(self, sid: bytes, point: int) -> Any:
        side = self._side(sid)
        if point not in side.points:
            raise Refused("unknown snap_id")
        counts = side.points[point]
        for number, layer in list(side.layers.items()):
            length = min(layer.count, counts.get(number, 0))
            if length < layer.count:
                layer.count = length
                layer.rows = {n: row for n, row in layer.rows.items() if n < length}
                if not layer.rows:
                    del side.layers[number]
        return OK

    def store_state(self, sid: bytes, layer: int, blob: bytes) -> Any:
        self.states[sid, layer] = blob
        return OK

    def drop_state(self, sid: bytes, layer: int | None) -> Any:
        for key in [k for k in self.states if k[0] == sid and layer in (None, k[1])]:
            del self.states[key]
        return OK

    # -- comparing ---------------------------------------------------------------

    def content(self) -> dict[Any, Any]:
        """Everything that a client can read, in the terms of ``observe``."""
        found: dict[Any, Any] = {}
        for sid, side in self.sides.items():
            counts = {n: layer.count for n, layer in side.layers.items()}
            found["session", sid] = (side.dim, counts, len(side.points))
            for n, layer in side.layers.items():
                found["rows", sid, n] = layer.stored(0, layer.count)
            if side.blocks is not None and sid.endswith(SIDES[0]):
                found["blocks", group_of(sid)] = side.blocks
        for (sid, number), blob in self.states.items():
            found["state", sid, number] = blob
        for namespace in {group_of(sid) for sid in self.sides}:
            if len(self.of_namespace(namespace)) == 2:
                found["hit", namespace] = True
        return found


def belongs(sid: bytes, namespace: bytes) -> bool:
    """Whether a state's sid is a namespace's own or one of its checkpoints'."""
    return sid == namespace or sid.startswith(namespace + b"@")


def sent_rows(
    place: tuple[bytes, int, int], spec: Spec, count: int, seed: int, how: Mapping[str, Any]
) -> RowsSent:
    """Rows that follow from ``seed``, encoded as ``how`` says: encoding, layout, crc."""
    sid, layer, start = place
    width, name, heads = spec
    kind = get_format(name)
    rng = np.random.default_rng([seed, layer, start, count])
    values = (rng.integers(-64, 65, (count, width)) / 8).astype(np.float32)
    encoding = how["encoding"]
    options: list[bytes] = []
    if encoding == "STORED" or name.startswith("raw:"):
        row_bytes = kind.row_bytes(width)
        stored = rng.integers(0, 256, (count, row_bytes), np.uint8)
        if not name.startswith("raw:"):
            stored = kind.encode(values)
        wire = stored.tobytes()
        options += [b"FMT", b"STORED"]
        if how["head_major"] and heads and name in _FLOATS and count and width % heads == 0:
            wire = stored.reshape(count, heads, -1).transpose(1, 0, 2).tobytes()
            options += [b"LAYOUT", b"HND"]
    else:
        stored = kind.encode(values)
        wire = values.tobytes()
        if encoding == "F16":
            wire = values.astype(np.float16).tobytes()
            options += [b"FMT", b"F16"]
    if how["crc"]:
        options += [b"CRC", b"%d" % crc32c(wire)]
    rows = tuple(bytes(row) for row in stored)
    return RowsSent(sid, layer, start, rows, wire, tuple(options))
