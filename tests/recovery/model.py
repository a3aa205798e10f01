"""A second, simple store to compare with: dictionaries of rows and states in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.recovery.driving import Content, Word

HEADS = 2
Rows = dict[int, bytes]


@dataclass(frozen=True)
class Model:
    """What a store must hold: rows by session and layer, states by sid and layer."""

    sessions: dict[bytes, dict[int, Rows]] = field(default_factory=dict)
    states: dict[tuple[bytes, int], bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Content) -> Model:
        """What a driver found, in the same terms."""
        sessions: dict[bytes, dict[int, Rows]] = {}
        states = {}
        for (kind, sid, layer), value in content.items():
            if kind == "session":
                sessions.setdefault(sid, {})
            elif kind == "state":
                states[sid, layer] = value[0]
            else:
                count, ranges, data = value
                size = len(data) // count
                rows = {n: data[n * size : (n + 1) * size] for a, b in ranges for n in range(a, b)}
                sessions.setdefault(sid, {})[layer] = rows
        return cls(sessions, states)

    def after(self, words: tuple[Word, ...]) -> Model:
        """What is held after a command that succeeds."""
        args = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        match args[0]:
            case b"KV.PREFIX.REGISTER":
                made = {args[1] + side: self.sessions.get(args[1] + side, {}) for side in _SIDES}
                return Model({**self.sessions, **made}, self.states)
            case b"V.STOREBATCH":
                return self._stored(args[1], int(args[2]), int(args[3]), int(args[4]), args[5])
            case b"SSM.PREFIX.STORE":
                return Model(self.sessions, {**self.states, (args[1], int(args[2])): args[3]})
            case b"KV.PREFIX.DROP":
                gone = {args[1] + side for side in _SIDES}
                kept = {sid: layers for sid, layers in self.sessions.items() if sid not in gone}
                return Model(kept, self.without_states(args[1]).states)
        return self

    def without_states(self, namespace: bytes) -> Model:
        """What is held when a DROP got as far as the states."""
        kept = {
            key: blob
            for key, blob in self.states.items()
            if key[0] != namespace and not key[0].startswith(namespace + b"@")
        }
        return Model(self.sessions, kept)

    def _stored(self, sid: bytes, layer: int, start: int, count: int, blob: bytes) -> Model:
        share = len(blob) // HEADS // count
        by_head = [blob[at : at + share] for at in range(0, len(blob), share)]
        new = {
            start + n: b"".join(by_head[head * count + n] for head in range(HEADS))
            for n in range(count)
        }
        layers = self.sessions[sid]
        layers = {**layers, layer: {**layers.get(layer, {}), **new}}
        return Model({**self.sessions, sid: layers}, self.states)


_SIDES = (b"_pk", b"_pv")
