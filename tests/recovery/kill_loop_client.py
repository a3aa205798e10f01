"""One of the clients that store, read, drop and save while their server is killed."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.recovery.kill_loop_content import (
    FOREVER,
    HEADS,
    LAYERS,
    SIDES,
    Content,
    Prefix,
    Seen,
    Words,
    agrees,
    look,
    token_major,
)
from tests.recovery.kill_loop_files import exported_agrees, mapped_agrees
from tests.recovery.kill_loop_keys import Keys, nbytes, outline
from tests.recovery.material import COMPLETION_LAYER, register
from tests.server.wire import Refusal, Wire

NARROW, WIDE = 64, 1024  # values a row: 128 bytes, 2 KB
#: stores from here on are long ones; shorter rows, some KiB of them, lie in segments, too.
LONG_BYTES = 64 << 10
#: rows from here on are written while they arrive, by the thread that receives them.
UPLOAD_BYTES = 1 << 20


@dataclass
class Counts:
    """What a client has done over the whole loop."""

    acknowledged: int = 0
    evicted: int = 0
    expired: int = 0
    files: int = 0
    bytes_checked: int = 0
    hits: int = 0


@dataclass
class Sending:
    """A command that is under way, and what kinds of command it is."""

    words: Words
    kinds: frozenset[str]


@dataclass
class Client:
    """See the module's docstring.

    ``pressure``: the server may evict what is not pinned; ``saves``: how often the client
    saves, of 1,000 commands (a log that nobody saves away, the server does by itself).
    """

    number: int
    seed: int
    told: Callable[[int, frozenset[str]], None]
    pressure: bool = False
    saves: int = 40
    counts: Counts = field(default_factory=Counts)
    sending: Sending | None = None
    failure: str = ""
    killed: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed} {self.number}")
        self.keys = Keys(f"k{self.number}")
        names = [f"c{self.number}{letter}" for letter in "abcd"]
        self.prefixes = [
            Prefix(name, WIDE if name.endswith("d") else NARROW, name.endswith("a"))
            for name in names
        ]
        self.history: deque[str] = deque(maxlen=40)
        self.actions: dict[Callable[[Wire, Prefix], None], int] = {
            self._rows: 36,
            self._state: 14,
            self._finish: 14,
            self._drop: 3,
            self._drop_side: 1,
            self._expire: 3,
            self._pin: 3,
            self._map: 7,
            self._export: 3,
            self._read: 5,
        }

    # -- a life ----------------------------------------------------------------

    def run(self, port: int) -> None:
        """Send one command after the other until told to stop, or the server is killed."""
        self.failure = "an error of its own"  # unless it ends well
        try:
            with Wire.tcp(port) as wire:
                while not self.stop.is_set():
                    self._step(wire)
            self.failure = ""
        except TimeoutError:
            self.failure = f"no answer to {self._shown()}"
        except (OSError, EOFError) as error:
            why = f"{error!r} from a server that runs, after {self._shown()}"
            self.failure = "" if self.killed.is_set() else why
        except AssertionError as error:
            self.failure = f"{error}\nhistory: " + "\n".join(self.history)

    def _shown(self) -> str:
        return "nothing" if self.sending is None else _shown(self.sending.words)

    def _step(self, wire: Wire) -> None:
        draw = self.chance.random()
        if draw < 0.2:
            self._keys(wire)
        elif draw < 0.2 + self.saves / 1000:
            words: Words = self.chance.choice((("KV.PREFIX.SAVE",), ("SAVE",)))
            answer = self._ask(wire, words, "save")
            assert answer == "OK" or "nothing to save" in str(answer), answer
        else:
            prefix = self.chance.choice(self.prefixes)
            if prefix.gone:
                self._begin(wire, prefix)
            elif prefix.keeper and not prefix.pinned:
                self._pin(wire, prefix)
            else:
                act = self.chance.choices(list(self.actions), list(self.actions.values()))[0]
                act(wire, prefix)

    def _ask(self, wire: Wire, words: Words, *kinds: str) -> object:
        """Send one command and wait for its answer."""
        self.sending = Sending(words, frozenset(kinds))
        self.history.append(f"{time.time():.3f} {_shown(words)}")
        self.told(self.number, self.sending.kinds)
        answer = wire.ask(*words)
        self.sending = None
        self.history[-1] += f" -> {str(answer)[:60]}"
        self.counts.acknowledged += "write" in kinds and not isinstance(answer, Refusal)
        return answer

    # -- writes ----------------------------------------------------------------

    def _write(self, wire: Wire, prefix: Prefix, words: Words, *results: Content) -> object:
        """A write of a prefix; the first of ``results`` is what it makes of it."""
        prefix.possible = results
        longest = max(len(word) for word in words if isinstance(word, (bytes, str)))
        kinds = ["long"] * (longest >= LONG_BYTES) + ["upload"] * (longest >= UPLOAD_BYTES)
        answer = self._ask(wire, words, "write", *kinds)
        prefix.possible = ()
        if isinstance(answer, Refusal):
            self._refused(prefix, answer)
        else:
            prefix.content = results[0]
        return answer

    def _refused(self, prefix: Prefix, answer: Refusal) -> None:
        """The only refusal: it was evicted, or its time is over."""
        assert "session not found" in answer, answer
        assert self._may_be_gone(prefix), f"{prefix.name} went: {answer}"
        self._note_gone(prefix)

    def _may_be_gone(self, prefix: Prefix) -> bool:
        return (self.pressure and not prefix.pinned) or time.time() >= prefix.until[0]

    def _note_gone(self, prefix: Prefix) -> None:
        if not prefix.gone:
            over = time.time() >= prefix.until[0]
            self.counts.expired += over
            self.counts.evicted += not over
        prefix.gone, prefix.pinned = True, False

    def _begin(self, wire: Wire, prefix: Prefix) -> None:
        """Drop what is left, create both sides; one that is to stay is pinned."""
        self._drop(wire, prefix)
        content = prefix.content.registered(prefix.name)
        self._write(wire, prefix, register(prefix.name, LAYERS, prefix.width), content)
        prefix.gone = False
        if prefix.keeper:
            self._pin(wire, prefix)

    def _drop(self, wire: Wire, prefix: Prefix) -> None:
        states_first = prefix.content.without_states()
        self._write(wire, prefix, ("KV.PREFIX.DROP", prefix.name), Content(), states_first)
        prefix.gone, prefix.pinned, prefix.until = True, False, FOREVER

    def _drop_side(self, wire: Wire, prefix: Prefix) -> None:
        sid = prefix.name + self.chance.choice(SIDES)
        states_first = prefix.content.without_states()
        before, words = prefix.content, ("V.DROP", sid)
        answer = self._write(wire, prefix, words, states_first.without_session(sid), states_first)
        if answer == 0:
            assert self._may_be_gone(prefix), f"{sid} went"
            self._note_gone(prefix)
            prefix.content = before
        prefix.gone, prefix.pinned = True, False

    def _unfinish(self, wire: Wire, prefix: Prefix) -> None:
        """A prefix that is about to change is no hit."""
        if prefix.finished:
            place = (prefix.name, COMPLETION_LAYER)
            self._write(
                wire, prefix, ("SSM.PREFIX.DROP", *place), prefix.content.without_state(*place)
            )

    def _rows(self, wire: Wire, prefix: Prefix) -> None:
        self._unfinish(wire, prefix)
        size = self.chance.choices((2_000, 9_000, 40_000, 90_000, 190_000), (3, 3, 3, 4, 2))[0]
        if prefix.width == WIDE and self.chance.random() < 0.15:
            size = self.chance.choice((1_300_000, 5_000_000))  # more than is received into memory
        count = max(1, size // prefix.row_bytes)
        sid = prefix.name + self.chance.choice(SIDES)
        layer, layout = self.chance.randrange(LAYERS), self.chance.choice(("HND", "NHD"))
        if self.chance.random() < 0.35:
            # what other clients store, too: equal rows are kept once
            start, layout = 0, "HND"
            blob = random.Random(f"{sid[-1]} {layer} {count}").randbytes(count * prefix.row_bytes)
        else:
            # a gap, an append, or over what is there
            start = self.chance.choice((0, self.chance.randrange(40)))
            blob = self.chance.randbytes(count * prefix.row_bytes)
        rows = token_major(blob, count, layout)
        if sid not in prefix.content.rows:
            return
        after = prefix.content.stored(sid, layer, start, rows, prefix.row_bytes)
        place = (sid, layer, start, count, blob)
        words = ("V.STOREBATCH", *place, "FMT", "STORED", "LAYOUT", layout)
        self._write(wire, prefix, words, after)

    def _state(self, wire: Wire, prefix: Prefix) -> None:
        self._unfinish(wire, prefix)
        place = (self.chance.choice(prefix.sids), self.chance.randrange(2))
        blob = self.chance.randbytes(self.chance.choice((300, 30_000, 70_000, 150_000)))
        words = ("SSM.PREFIX.STORE", *place, blob)
        self._write(wire, prefix, words, prefix.content.with_state(*place, blob))

    def _finish(self, wire: Wire, prefix: Prefix) -> None:
        """The last write of a store: the completion record."""
        place, record = (prefix.name, COMPLETION_LAYER), prefix.content.record()
        words = ("SSM.PREFIX.STORE", *place, record)
        self._write(wire, prefix, words, prefix.content.with_state(*place, record))

    def _pin(self, wire: Wire, prefix: Prefix) -> None:
        """Pin what is to stay, now and then after unpinning it."""
        if prefix.pinned or not prefix.keeper:
            prefix.pinned = False
            self._write(wire, prefix, ("KV.PREFIX.UNPIN", prefix.name), prefix.content)
        if not prefix.keeper:
            return
        self._write(wire, prefix, ("KV.PREFIX.PIN", prefix.name), prefix.content)
        # pinned from now on, if nothing of it had gone before
        prefix.pinned = self._ask(wire, ("KV.PREFIX.LOOKUP", prefix.name), "read") == "HIT"
        if not prefix.pinned:
            assert self._may_be_gone(prefix), f"{prefix.name} went before it was pinned"
            self._note_gone(prefix)

    def _expire(self, wire: Wire, prefix: Prefix) -> None:
        seconds = self.chance.choice((-1, 1000) if prefix.keeper else (0, 0, 1, 1, 1000, -1))
        before, old = time.time(), prefix.until
        first = before + seconds - 0.002 if seconds >= 0 else FOREVER[0]  # it counts milliseconds
        prefix.until = (min(old[0], first), FOREVER[1])
        words = ("KV.PREFIX.EXPIRE", prefix.name, seconds)
        answer = self._write(wire, prefix, words, prefix.content)
        if answer == 0:
            prefix.until = (min(old[0], before), FOREVER[1])
            assert old[0] <= time.time() or (self.pressure and not prefix.pinned), prefix.name
            self._note_gone(prefix)
        else:
            prefix.until = (first, time.time() + seconds) if seconds >= 0 else FOREVER

    def _keys(self, wire: Wire) -> None:
        commands = self.keys.draw(self.chance)
        self.keys.possible = [self.keys.after(commands)]
        self.sending = Sending(commands[0], frozenset({"write"}))
        self.told(self.number, self.sending.kinds)
        answers = wire.together(*commands)
        assert not any(isinstance(answer, Refusal) for answer in answers), answers
        self.sending = None
        self.counts.acknowledged += 1
        (self.keys.values,) = self.keys.possible
        self.keys.possible = []

    # -- reads -----------------------------------------------------------------

    def _map(self, wire: Wire, prefix: Prefix) -> None:
        """The files that the server names hold the rows, as safetensors' own reader sees them."""
        answer = self._ask(wire, ("KV.PREFIX.MAP", prefix.name), "map")
        if isinstance(answer, Refusal):
            assert "under way" in answer, answer
        elif isinstance(answer, bytes):
            self.counts.files += mapped_agrees(answer, prefix)
        else:
            empty = not any(prefix.content.rows.values())
            assert empty or self._may_be_gone(prefix), f"{prefix.name}: {answer}"

    def _export(self, wire: Wire, prefix: Prefix) -> None:
        layers = [prefix.content.rows.get(prefix.name + side, {}) for side in SIDES]
        sizes = [len(rows.get(layer, b"")) for rows in layers for layer in range(LAYERS)]
        end = min(sizes) // prefix.row_bytes
        if not end:
            return
        sids = [prefix.name + side for side in SIDES]
        cut = (LAYERS, HEADS, prefix.width // HEADS)
        words: Words = ("V.EXPORT", *sids, 0, end, *cut, "FMT", "STORED")
        answer = self._ask(wire, words, "export")
        if isinstance(answer, bytes):
            self.counts.files += exported_agrees(answer.decode(), prefix, end)
        else:
            moved = "changed while" in str(answer)
            assert moved or self._may_be_gone(prefix), f"{prefix.name}: {answer}"

    def _read(self, wire: Wire, prefix: Prefix) -> None:
        (seen,) = look(wire, [prefix])
        self._compare(prefix, seen, [prefix.content], going=True)

    # -- after a kill ----------------------------------------------------------

    def check(self, wire: Wire) -> None:
        """Compare everything with what the server has, and go on from what it has."""
        # a deadline that passes while it is looked at may or may not have been over
        before = time.time()
        seen = look(wire, self.prefixes)
        for prefix, shown in zip(self.prefixes, seen, strict=True):
            known = [prefix.content, *prefix.possible]
            passed = before < prefix.until[1] and prefix.until[0] <= time.time()
            self._compare(prefix, shown, known, going=passed)
            assert not shown.content.rows or before < prefix.until[1], f"{prefix.name} is back"
            prefix.content, prefix.possible = shown.content, ()
            if not shown.content.whole():
                if all(content.whole() for content in known):
                    self._note_gone(prefix)
                prefix.gone = True
            # whether it was pinned by what was under way is not known
            prefix.pinned = prefix.pinned and not prefix.gone
        values = self.keys.look(wire)
        right = [self.keys.values, *self.keys.possible]
        if values not in right:
            wanted = " or ".join(outline(one) for one in right)
            raise AssertionError(f"keys {outline(values)} instead of {wanted}")
        self.counts.bytes_checked += nbytes(values)
        self.keys.values, self.keys.possible = values, []
        self.sending = None

    def _compare(
        self, prefix: Prefix, seen: Seen, wanted: Sequence[Content], going: bool = False
    ) -> None:
        found = seen.content
        gone = self._may_be_gone(prefix)
        if not any(agrees(found, content, gone, going) for content in wanted):
            raise AssertionError(
                f"{prefix.name} (pressure {self.pressure}, pinned {prefix.pinned}, "
                f"until {prefix.until}) has {found.outline()} instead of "
                + " or ".join(content.outline() for content in wanted)
            )
        assert not seen.hit or gone or found.whole(), f"{prefix.name}: half a prefix is a hit"
        record = found.states.get((prefix.name, COMPLETION_LAYER))
        if record is not None and found.whole():
            assert record == found.record(), f"{prefix.name}: an unfinished prefix is a hit"
            self.counts.hits += 1
        self.counts.bytes_checked += found.nbytes()


def _shown(words: Words) -> str:
    """A command on one short line."""
    return " ".join(f"<{len(w)}>" if isinstance(w, bytes) else str(w) for w in words)
