"""The plain keys of one client of the kill loop: commands, and a dictionary to compare with."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from tests.server.wire import Wire, Word

Words = tuple[Word, ...]
Values = dict[str, Any]
_STRINGS = ("s0", "s1", "s2")


class Keys:
    """What a client's keys must hold: strings, a number, a hash, a list.

    ``possible``: the same after the commands that are under way.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.values: Values = {}
        self.possible: list[Values] = []

    def name(self, short: str) -> str:
        return f"{self.client}:{short}"

    def draw(self, chance: random.Random) -> list[Words]:
        """Some write; several commands are one transaction."""
        kind = chance.choices(
            ("short", "long", "number", "hash", "push", "pop", "delete", "several", "huge"),
            (6, 2, 4, 3, 3, 2, 1, 4, 1),
        )[0]
        if kind == "several":
            return self._transaction(("short", "number", "hash"), chance)
        if kind == "huge":  # more than one append to the log
            return self._transaction(("number", *["longest"] * 3, "hash"), chance)
        return [self._write(kind, chance)]

    def _transaction(self, kinds: Iterable[str], chance: random.Random) -> list[Words]:
        return [("MULTI",), *(self._write(kind, chance) for kind in kinds), ("EXEC",)]

    def _write(self, kind: str, chance: random.Random) -> Words:
        string = self.name(chance.choice(_STRINGS))
        match kind:
            case "short":
                return ("SET", string, chance.randbytes(chance.randrange(2_000)))
            case "long":
                return ("SET", string, chance.randbytes(chance.randrange(66_000, 120_000)))
            case "longest":
                return ("SET", string, chance.randbytes(500_000))
            case "number":
                return ("INCR", self.name("n"))
            case "hash":
                return ("HSET", self.name("h"), f"f{chance.randrange(4)}", chance.randbytes(100))
            case "push":
                return ("RPUSH", self.name("l"), chance.randbytes(40))
            case "pop":
                return ("LPOP", self.name("l"))
        return ("DEL", string)

    def after(self, commands: list[Words]) -> Values:
        """The values once these commands are carried out."""
        values = dict(self.values)
        for words in commands:
            match words:
                case ("SET", str(key), bytes(value)):
                    values[key] = value
                case ("INCR", str(key)):
                    values[key] = b"%d" % (int(values.get(key, b"0")) + 1)
                case ("HSET", str(key), str(name), bytes(value)):
                    values[key] = {**values.get(key, {}), name.encode(): value}
                case ("RPUSH", str(key), bytes(value)):
                    values[key] = [*values.get(key, []), value]
                case ("LPOP", str(key)):
                    values[key] = values.get(key, [])[1:]
                case ("DEL", str(key)):
                    values.pop(key, None)
        # a list without items is no key
        return {key: value for key, value in values.items() if value != []}

    def look(self, wire: Wire) -> Values:
        """The values that the server has."""
        strings = [self.name(short) for short in (*_STRINGS, "n")]
        lines, table = self.name("l"), self.name("h")
        answers = wire.together(
            *(("GET", key) for key in strings), ("LRANGE", lines, 0, -1), ("HGETALL", table)
        )
        found = dict(zip(strings, answers, strict=False))
        found[lines] = answers[-2]
        pairs = iter(answers[-1])
        found[table] = dict(zip(pairs, pairs, strict=True))
        # an empty string is a value, an empty list is none
        return {key: value for key, value in found.items() if value not in (None, [], {})}


def outline(values: Values) -> str:
    """The keys, and how long their values are."""
    return str({k: len(v) for k, v in values.items()})


def nbytes(values: Values) -> int:
    """Bytes of all values."""
    total = 0
    for value in values.values():
        total += sum(map(len, value)) if isinstance(value, (dict, list)) else len(value)
    return total
