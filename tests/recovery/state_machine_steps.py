"""What the state machine does between two restarts: one method a step, drawn by a ``Random``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, ClassVar

import numpy as np
from safetensors import safe_open

from tests.recovery.state_machine_commands import (
    NAMESPACES,
    SIDS,
    Effect,
    Op,
    Words,
    World,
    key_ops,
    key_words,
    prefix_ops,
)
from tests.recovery.state_machine_keys import OK, Moment, Refused
from tests.recovery.state_machine_memory import embedding
from tests.recovery.state_machine_observe import same_index
from tests.recovery.state_machine_server import ForkedServer
from tests.server.wire import Refusal, Wire


def now() -> Moment:
    """The present, as wide as clocks are read."""
    ms = int(time.time() * 1000)
    return Moment(ms - 2, ms + 2)


def outcome(effect: Effect, world: World, at: Moment) -> Any:
    try:
        return effect(world, at)
    except Refused as refusal:
        return refusal


def agree(words: Words, reply: Any, expected: Any) -> None:
    """The reply is the model's; a refusal says why."""
    shown = tuple(word[:60] for word in words)
    if isinstance(expected, Refused):
        assert isinstance(reply, Refusal), (shown, reply, expected)
        assert expected.fragment in reply, (shown, reply, expected)
    else:
        assert not isinstance(reply, Refusal) or expected == reply, (shown, reply, expected)
        assert expected == reply, (shown, reply, expected)


class Steps:
    """A server and its model; ``done`` counts the commands that were not refused, over all runs."""

    done: ClassVar[Counter[str]] = Counter()
    server: ForkedServer
    world: World
    wire: Wire | None

    @property
    def client(self) -> Wire:
        assert self.wire is not None
        return self.wire

    def ask(self, words: Words) -> Any:
        reply = self.client.ask(*words)
        if not isinstance(reply, Refusal):
            self.done[words[0].decode()] += 1
        assert not (isinstance(reply, Refusal) and "internal" in reply), words
        return reply

    def send(self, words: Words, effect: Effect) -> Any:
        """One command to both; what both answered."""
        before = now()
        reply = self.ask(words)
        expected = outcome(effect, self.world, Moment(before.earliest, now().latest))
        agree(words, reply, expected)
        return reply

    # -- writes that are logged --------------------------------------------------

    def prefix(self, rng: Random) -> None:
        self.send(*prefix_ops(rng).prepare(self.world, now()))

    def key(self, rng: Random) -> None:
        self.send(*key_ops(rng).prepare(self.world, now()))

    def transaction(self, rng: Random) -> None:
        end = rng.choice(["EXEC", "EXEC", "EXEC", "DISCARD", "broken", "watched"])
        if end == "watched":
            assert self.ask((b"WATCH", b"k")) == OK
            with Wire.tcp(self.server.port) as other:
                words: Words = (b"SET", b"k", b"other")
                agree(words, other.ask(*words), self.world.keys.run(words, now()))
        assert self.ask((b"MULTI",)) == OK
        before = now()
        commands = [key_words(rng) for _ in range(rng.randint(0, 8))]
        for words in commands:
            assert self.ask(words) == "QUEUED", words
        if end == "DISCARD":
            assert self.ask((b"DISCARD",)) == OK
        elif end == "broken":
            assert "wrong number" in self.ask((b"GET",))
            assert "EXECABORT" in self.ask((b"EXEC",))
        elif end == "watched":
            assert self.ask((b"EXEC",)) is None
        else:
            self._executed(commands, before)

    def _executed(self, commands: list[Words], before: Moment) -> None:
        replies = self.ask((b"EXEC",))
        at = Moment(before.earliest, now().latest)
        assert len(replies) == len(commands)
        for words, reply in zip(commands, replies, strict=True):
            clear = self.world.keys.settled(words, at)
            if clear == words:
                effect = partial(World.run_keys, words=words)
                agree(words, reply, outcome(effect, self.world, at))
            elif reply == 1:
                # too close for the model: the server says which deadline is later
                self.world.keys.run(clear, at)

    def key_that_ends_soon(self, rng: Random) -> None:
        """A deadline that passes while somebody looks."""
        key = rng.choice([b"k", b"l"])
        words: Words = (b"SET", key, b"v", b"PX", b"10")
        self.send(words, lambda world, at: world.keys.run(words[:3], at))
        if rng.random() < 0.5:
            assert self.ask((b"PEXPIRE", key, b"8")) in (0, 1)
        time.sleep(0.02)
        assert self.ask((b"EXISTS", key)) == 0
        self.world.keys.run((b"DEL", key), now())

    def prefix_that_ends_now(self, rng: Random) -> None:
        namespace = rng.choice(NAMESPACES)
        unpin = Op("pin", (namespace, False))
        self.send(*unpin.prepare(self.world, now()))
        words: Words = (b"KV.PREFIX.EXPIRE", namespace, b"0")
        self.send(words, lambda world, _: world.prefixes.expire_now(namespace))
        assert self.ask((b"KV.PREFIX.LOOKUP", namespace)) == "MISS"
        if rng.random() < 0.5:
            op = Op("register", (namespace, (32, "fp16", 0), None, None))
            self.send(*op.prepare(self.world, now()))

    # -- rollback points ---------------------------------------------------------

    def take_point(self, rng: Random, sid: bytes = b"") -> None:
        sid = sid or self._stored_sid(rng)
        reply = self.ask((b"V.SNAPSHOT", sid))
        if isinstance(reply, int):
            assert all(reply > old for old in self.world.prefixes.sides[sid].points)
            self.world.prefixes.snapshot(sid, reply)
        else:
            effect: Effect = lambda world, _: world.prefixes.snapshot(sid, -1)  # noqa: E731
            agree((b"V.SNAPSHOT", sid), reply, outcome(effect, self.world, now()))

    def _stored_sid(self, rng: Random) -> bytes:
        """Mostly one that is there."""
        there = sorted(self.world.prefixes.sides)
        return rng.choice(there if there and rng.random() < 0.9 else SIDS)

    def use_point(self, rng: Random, sid: bytes = b"") -> None:
        """Back to a point; it may be released then."""
        sides = self.world.prefixes.sides
        with_points = sorted(name for name, side in sides.items() if side.points)
        sid = sid or (rng.choice(with_points) if with_points else self._stored_sid(rng))
        points = list(sides[sid].points) if sid in sides else []
        point = rng.choice(points) if points else 5
        words: Words = (b"V.RESTORE", sid, b"%d" % point)
        self.send(words, lambda world, _: world.prefixes.restore(sid, point))
        if points and rng.random() < 0.5:
            assert self.ask((b"V.COMMIT", sid, b"%d" % point)) == 1
            assert self.ask((b"V.COMMIT", sid, b"%d" % point)) == 0
            del sides[sid].points[point]

    def branch(self, rng: Random) -> None:
        """Points of one session, rows over and behind its ends, and back to the points."""
        sid = self._stored_sid(rng)
        side = self.world.prefixes.sides.get(sid)
        for _ in range(rng.randint(4, 10) if side is not None else 0):
            assert side is not None
            action = rng.choice(["point", "rows", "rows", "back", "back"])
            if action == "point" or (action == "back" and not side.points):
                self.take_point(rng, sid)
            elif action == "back":
                self.use_point(rng, sid)
            else:
                layer = rng.choice([0, *side.layers])
                end = side.layers[layer].count if layer in side.layers else 0
                place = (sid, layer, max(0, end + rng.choice([-2, 0, 3])))
                how = {"encoding": "STORED", "head_major": rng.random() < 0.5, "crc": False}
                op = Op("store", (place, rng.randint(1, 4), rng.randrange(4), how))
                self.send(*op.prepare(self.world, now()))
        self.read(rng, sid)

    # -- what is in memory only --------------------------------------------------

    def slot(self, rng: Random) -> None:
        name, ring, size = rng.choice([b"s", b"t"]), rng.random() < 0.5, rng.choice([1, 8, 16])
        if rng.random() < 0.4:
            mode = b"ring" if ring else b"fixed"
            words: Words = (b"STATE.ALLOC", name, b"%d" % size, b"MODE", mode)
            self.send(words, lambda world, _: world.memory.alloc(name, size, ring))
        elif rng.random() < 0.1:
            self.send((b"STATE.FREE", name), lambda world, _: world.memory.free(name))
        offset, data = rng.choice([0, 3, 12, 1 << 40]), rng.randbytes(rng.randint(0, 9))
        words = (b"STATE.WRITE", name, b"%d" % offset, data)
        self.send(words, lambda world, _: world.memory.write(name, offset, data))
        length = max(1, len(data))
        words = (b"STATE.READ", name, b"%d" % offset, b"%d" % length)
        self.send(words, lambda world, _: world.memory.read(name, offset, length))

    def blob(self, rng: Random) -> None:
        name, direction = rng.choice([b"x", b"y", b"z"]), rng.randrange(3)
        blob, model = rng.choice([b"", b"blob", b"\xff" * 70_000]), rng.choice([b"", b"m"])
        more = (b"MODEL", model) if model else (b"TTL", b"1000")
        words: Words = (b"KV.STORE", name, embedding(direction), blob, *more)
        self.send(words, lambda world, _: world.memory.keep(name, direction, blob, model))
        other, tag = rng.randrange(3), rng.choice([None, b"", b"m"])
        extra = () if tag is None else (b"MODEL", tag)
        found = self.ask((b"KV.FETCH", embedding(other), *extra))
        assert found == self.world.memory.find(other, tag), (other, tag)

    def index(self, rng: Random) -> None:
        """Open an index, or append to one and ask it."""
        sid, width = rng.choice([b"i", b"alpha"]), rng.choice([2, 4])
        if rng.random() < 0.5 or sid not in self.world.memory.indices:
            words: Words = (b"ATTEND.CREATE", sid, b"%d" % width, b"2", b"VQUANT", b"fp32")
            reply = self.ask(words)
            effect: Effect = lambda world, _: world.memory.open_index(sid, (width, 2))  # noqa: E731
            expected = outcome(effect, self.world, now())
            agree(words, None if isinstance(reply, int) else reply, expected)
        self._store_keys(rng, sid, rng.choice([0, 7]), rng.randint(1, 5))

    def _store_keys(self, rng: Random, sid: bytes, layer: int, rows: int) -> None:
        width = self.world.memory.indices[sid].widths[0]
        numbers = np.random.default_rng(rng.getrandbits(32))
        keys = numbers.integers(-9, 9, (rows, width)).astype("<f4")
        values = numbers.integers(-9, 9, (rows, 2)).astype("<f4")
        place = (sid, b"%d" % layer)
        words: Words = (b"ATTEND.STORE", *place, b"%d" % rows, keys.tobytes(), values.tobytes())

        def effect(world: World, _: Moment) -> Any:
            held = world.memory.index(sid).layers.setdefault(layer, [])
            held += [(key, value.tobytes()) for key, value in zip(keys, values, strict=True)]
            return OK

        self.send(words, effect)
        if rng.random() < 0.3:
            self.send((b"ATTEND.FINALIZE", *place), lambda world, _: OK)
        same_index(self.client, self.world.memory, sid)

    def resident(self, rng: Random) -> None:
        """K and V that queries see at once; of one token attention is its V."""
        sid, held = rng.choice([b"r", b"q"]), self.world.memory.resident
        self._is_resident(sid)

        def forget(world: World, _: Moment) -> Any:
            world.memory.resident.pop(sid, None)
            return 0  # no such prefix is stored

        if rng.random() < 0.2:
            self.send((b"KV.PREFIX.DROP", sid), forget)
            return
        shape = [rng.choice([1, 2]), rng.choice([1, 1, 3]), 32]
        numbers = np.random.default_rng(rng.getrandbits(32))
        k, v = (numbers.integers(-9, 9, shape).astype("<f4").tobytes() for _ in "kv")

        def effect(world: World, _: Moment) -> Any:
            world.memory.resident[sid] = shape, v
            return OK

        words = (b"ATTEND.PREFIX.STORE", sid, b"0", *(b"%d" % one for one in shape), k, v)
        self.send(words, effect)
        self._is_resident(sid)
        if held[sid][0][1] == 1:
            query = (b"%d" % shape[0], b"32", b"1", k)
            assert self.ask((b"ATTEND.PREFIX.QUERY", sid, b"0", *query)) == v

    def _is_resident(self, sid: bytes) -> None:
        held = self.world.memory.resident.get(sid)
        expected = ["HIT", *held[0]] if held else ["MISS", 0, 0, 0]
        assert self.ask((b"ATTEND.PREFIX.LOOKUP", sid, b"0", b"SHAPE")) == expected

    # -- snapshots, exports, reads -----------------------------------------------

    def save(self, rng: Random) -> None:
        name = rng.choice(["KV.PREFIX.SAVE", "SAVE", "BGSAVE", "KV.PREFIX.COMMIT", "copy"])
        words: Words = (b"KV.PREFIX.SAVE", b"copy") if name == "copy" else (name.encode(),)
        reply = self.ask(words)
        if name in ("copy", "KV.PREFIX.SAVE") and isinstance(reply, Refusal):
            assert "nothing to save" in reply and not self.world.prefixes.content()
        else:
            assert reply in (OK, "Background saving started"), reply
            assert name != "copy" or (self.server.dir / "copy").stat().st_size

    def seal(self, rng: Random) -> None:
        namespace = rng.choice(NAMESPACES)
        reply = self.ask((b"KV.PREFIX.MAP", namespace))
        sides = self.world.prefixes.of_namespace(namespace)
        there = len(sides) == 2 and any(side.layers for side in sides)
        assert isinstance(reply, bytes) if there else reply == "UNKNOWN", reply

    def export(self, rng: Random) -> None:
        """The exported file holds the stored rows."""
        namespace = rng.choice(NAMESPACES)
        sides = self.world.prefixes.of_namespace(namespace)
        layers = [side.layers.get(0) for side in sides]
        if len(layers) < 2 or layers[0] is None or layers[1] is None:
            return
        width, rows = layers[0].spec[0], min(layers[0].count, layers[1].count)
        sids = (namespace + b"_pk", namespace + b"_pv")
        words = (b"V.EXPORT", *sids, b"0", b"%d" % rows, b"1", b"1", b"%d" % width)
        reply = self.ask((*words, b"FMT", b"STORED"))
        if isinstance(reply, Refusal):
            assert layers[1].spec[0] != width or "heads" in reply, reply
            return
        with safe_open(reply.decode(), "numpy") as file:
            for name, layer in zip("kv", layers, strict=True):
                assert layer is not None
                if layer.spec[1] in ("fp16", "fp32"):
                    assert file.get_tensor(f"{name}.0").tobytes() == layer.stored(0, rows)

    def read(self, rng: Random, sid: bytes = b"") -> None:
        """Float rows, past the end too."""
        sid = sid or self._stored_sid(rng)
        side = self.world.prefixes.sides.get(sid)
        if side is None or not side.layers:
            return
        number = rng.choice(sorted(side.layers))
        layer = side.layers[number]
        if layer.spec[1].startswith("raw:"):
            return
        end = layer.count + 2
        place = (b"V.FETCH", sid, b"%d" % number)
        assert self.ask((*place, b"RANGE", b"1", b"%d" % end)) == layer.floats(1, end)
        ids = [n for n in (0, layer.count - 1, layer.count) if n in layer.rows]
        if ids:
            expected = b"".join(layer.floats(n, n + 1) for n in ids)
            assert self.ask((*place, *(b"%d" % n for n in ids))) == expected

    steps: ClassVar[list[Callable[[Steps, Random], None]]] = [
        *[prefix, key] * 12,
        *[transaction, take_point, use_point, branch, branch, slot, blob, index, resident, read]
        * 2,
        *[prefix_that_ends_now, key_that_ends_soon, save, seal, export],
    ]
