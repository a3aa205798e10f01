"""What one client of the kill loop knows that the server must hold, and how to compare.

A model holds rows as they are answered: token-major, zeros in the gaps. Whatever a command
makes of it is worked out before the command is sent; a command that was under way when the
server was killed leaves several contents that are right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from crc32c import crc32c

from tests.recovery.material import COMPLETION_LAYER
from tests.server.wire import Refusal, Wire, Word

Words = tuple[Word, ...]
HEADS = 2
LAYERS = 2
SIDES = ("_pk", "_pv")
FOREVER = (math.inf, math.inf)


def token_major(blob: bytes, count: int, layout: str) -> bytes:
    """Rows of a STOREBATCH, ``[H, n, D]`` or ``[n, H*D]``, as ``[n, H*D]``."""
    if layout == "NHD":
        return blob
    heads = np.frombuffer(blob, np.uint8).reshape(HEADS, count, -1)
    return bytes(heads.transpose(1, 0, 2).tobytes())


@dataclass(frozen=True)
class Content:
    """Rows by session and layer, states by sid and layer. Never changed in place."""

    rows: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    states: Mapping[tuple[str, int], bytes] = field(default_factory=dict)

    def registered(self, name: str) -> Content:
        return Content({name + side: self.rows.get(name + side, {}) for side in SIDES}, self.states)

    def stored(self, sid: str, layer: int, start: int, new: bytes, row_bytes: int) -> Content:
        layers = self.rows[sid]
        old = layers.get(layer, b"")
        data = bytearray(max(len(old), start * row_bytes + len(new)))
        data[: len(old)] = old
        data[start * row_bytes : start * row_bytes + len(new)] = new
        return Content({**self.rows, sid: {**layers, layer: bytes(data)}}, self.states)

    def with_state(self, sid: str, layer: int, blob: bytes) -> Content:
        return Content(self.rows, {**self.states, (sid, layer): blob})

    def without_state(self, sid: str, layer: int) -> Content:
        kept = {key: blob for key, blob in self.states.items() if key != (sid, layer)}
        return Content(self.rows, kept)

    def without_states(self) -> Content:
        return Content(self.rows)

    def without_session(self, sid: str) -> Content:
        return Content({name: layers for name, layers in self.rows.items() if name != sid})

    def whole(self) -> bool:
        """Whether both sides are there."""
        return len(self.rows) == len(SIDES)

    def record(self) -> bytes:
        """A completion record: the checksums of everything but itself."""
        parts = {f"{s} {n}": d for s, layers in self.rows.items() for n, d in layers.items()}
        parts |= {f"{s} @{n}": b for (s, n), b in self.states.items() if n != COMPLETION_LAYER}
        sums = {name: [len(part), crc32c(part)] for name, part in sorted(parts.items())}
        return json.dumps(sums).encode()

    def nbytes(self) -> int:
        rows = sum(len(data) for layers in self.rows.values() for data in layers.values())
        return rows + sum(map(len, self.states.values()))

    def outline(self) -> str:
        """What there is, and how much of it."""
        rows = {sid: {n: len(d) for n, d in layers.items()} for sid, layers in self.rows.items()}
        states = {f"{sid} {n}": len(blob) for (sid, n), blob in self.states.items()}
        return f"rows {rows} states {states}"


def agrees(found: Content, wanted: Content, may_be_gone: bool, going: bool = False) -> bool:
    """Whether what was found is what is wanted.

    What was evicted or has expired may be gone: all states, the completion record among them,
    and then at least a side. What is left of it is right, too. A kill in between leaves rows
    that cannot be a hit; ``going``: it may have gone while it was read.
    """
    if found == wanted:
        return True
    if not may_be_gone:
        return False
    if wanted.whole() and found.whole() and not going:
        return found.rows == wanted.rows and not found.states
    rows = all(wanted.rows.get(sid) == layers for sid, layers in found.rows.items())
    return rows and all(wanted.states.get(key) == blob for key, blob in found.states.items())


@dataclass
class Prefix:
    """One namespace of a client.

    ``possible``: what it may hold if the command under way was carried out, or in part;
    ``gone``: a side of it is missing, it is begun anew; ``until``: it is there before the
    first of these unix times and a miss after the second.
    """

    name: str
    width: int
    keeper: bool
    content: Content = field(default_factory=Content)
    possible: Sequence[Content] = ()
    pinned: bool = False
    gone: bool = True
    until: tuple[float, float] = FOREVER

    @property
    def row_bytes(self) -> int:
        return self.width * 2

    @property
    def finished(self) -> bool:
        return (self.name, COMPLETION_LAYER) in self.content.states

    @property
    def sids(self) -> tuple[str, str]:
        """Where its states are: its own and those of a checkpoint."""
        return self.name, f"{self.name}@64"


@dataclass(frozen=True)
class Seen:
    """A prefix as the server showed it."""

    content: Content
    hit: bool


def look(wire: Wire, prefixes: Sequence[Prefix]) -> list[Seen]:
    """All that the server has of some prefixes, in two round trips.

    Completion records are read last: what one speaks of was there before.
    """
    asked: list[Words] = []
    for prefix in prefixes:
        asked.append(("KV.PREFIX.LOOKUP", prefix.name))
        asked += [("V.INFO", prefix.name + side) for side in SIDES]
        asked += [("SSM.PREFIX.FETCH", sid, layer) for sid in prefix.sids for layer in (0, 1)]
    answers = iter(wire.together(*asked))
    hits, counts, states = [], [], []
    for prefix in prefixes:
        hits.append(next(answers) == "HIT")
        counts.append({prefix.name + side: _layers(next(answers)) for side in SIDES})
        states.append({(sid, layer): next(answers) for sid in prefix.sids for layer in (0, 1)})
    asked = [words for sessions in counts for words in _fetches(sessions)]
    asked += [("SSM.PREFIX.FETCH", prefix.name, COMPLETION_LAYER) for prefix in prefixes]
    answers = iter(wire.together(*asked))
    rows = [_rows(answers, sessions) for sessions in counts]
    for prefix, blobs in zip(prefixes, states, strict=True):
        blobs[prefix.name, COMPLETION_LAYER] = next(answers)
    there = [{k: blob for k, blob in blobs.items() if blob is not None} for blobs in states]
    return [Seen(Content(r, s), hit) for r, s, hit in zip(rows, there, hits, strict=True)]


_Counts = Mapping[str, "dict[int, int] | None"]


def _layers(info: Any) -> dict[int, int] | None:
    """The layers of a session with their row counts, from V.INFO; None without a session."""
    if info is None:
        return None
    assert isinstance(info, bytes), info
    lines = (line.split(":") for line in info.decode().split("\r\n") if line.startswith("layer_"))
    return {int(name.split("_")[1]): int(count) for name, count in lines if "_tokens" in name}


def _fetches(sessions: _Counts) -> list[Words]:
    """The commands that fetch the rows of every layer."""
    form = ("FMT", "STORED", "LAYOUT", "NHD")
    return [
        ("V.FETCH", sid, layer, "RANGE", 0, count, *form)
        for sid, layers in sessions.items()
        for layer, count in (layers or {}).items()
    ]


def _rows(answers: Iterator[Any], sessions: _Counts) -> dict[str, dict[int, bytes]]:
    """Their answers; a session that went meanwhile is gone."""
    found: dict[str, dict[int, bytes]] = {}
    for sid, layers in sessions.items():
        data = {layer: next(answers) for layer in layers or ()}
        refusals = [answer for answer in data.values() if isinstance(answer, Refusal)]
        assert all("session not found" in refusal for refusal in refusals), refusals
        if layers is not None and not refusals:
            found[sid] = data
    return found
