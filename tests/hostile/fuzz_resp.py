"""Random RESP commands, for every command of the table, and what mutated ones call for."""

from __future__ import annotations

import json
import re
from random import Random

from pion_vllm_mlx.errors import ProtocolError
from pion_vllm_mlx.server import commands
from pion_vllm_mlx.server.command import TABLE, Command
from pion_vllm_mlx.server.command_syntax import Node, parse
from pion_vllm_mlx.wire.inline import split_inline
from tests.hostile.fuzz_bytes import NUMBERS, PLAIN, Expected, Mutation

assert commands.__all__

#: stops the server, which is not what is tested
LEFT_OUT = {"SHUTDOWN"}
#: commands with long replies, or that write files: now and then is enough
_RARE = {"COMMAND", "SAVE", "BGSAVE", "KV.PREFIX.SAVE", "V.EXPORT", "KV.PREFIX.COMMIT", "CONFIG"}

Words = tuple[bytes, ...]

_NAMES = (b"n1", b"n2", b"n1_pk", b"n1_pv", b"n2_pk", b"n2_pv", b"n1@4", b"\xff\r\n|", b"*1", b"k")
_HOSTILE = (
    b"",
    b"\x00",
    b"x" * 300,
    b"%s%n",
    b"../../etc",
    b"$5\r\n",
    "ü€".encode(),
    b"n" * 70_000,
)
_SMALL = (b"0", b"1", b"1", b"2", b"4", b"8", b"8", b"64")
_FORMATS = (b"fp16", b"fp32", b"bf16", b"int8", b"fp8", b"turbo4", b"turbo2", b"mlx4g32", b"raw:16")
_SCHEMAS = (b"fmt=fp16", b"fmt=fp8,dim=32", b"fmt=bf16_rope_fp8_body,dim=64,rope=32", b"s=1", b"=,")
_PATHS = (
    b"copy",
    b"copy",
    b"/x",
    b"../x",
    b"pion.wal.0",
    b"a\x00b",
    b"nowhere/x",
    b"x" * 400,
    b".",
)
_PATTERNS = (b"*", b"n*", b"[a-", b"[^\\", b"?" * 30, b"*a" * 200, b"\\", b"[]-z]*")
_SCORES = (b"1", b"-inf", b"1e308", b"nan", b"0x1p3", b"1_0", b".5")
_WORDS = {
    "pattern": _PATTERNS,
    "path": _PATHS,
    "score": _SCORES,
    "cosine": (b"0.9", b"1", b"-1", b"2", b"nan"),
    "spec": _SCHEMAS,
    "proto": (b"2", b"3", b"3", b"4"),
    "database": (b"0", b"1"),
    "parameter": (b"maxmemory", b"dir"),
    "type": (b"string", b"hash", b"zset", b"x"),
    "name": (b"get", b"v.fetch", b"nobody"),
    "section": (b"all", b"pion", b"memory", b"x"),
    "cursor": (b"0", b"0", b"5", b"18446744073709551616", b"9" * 5000),
}
_FORMAT_NAMES = {"format", "boundary_format"}
_BLOBS = {"blob", "k_blob", "v_blob", "q_blob", "query_blob", "hashes", "token_blob", "embedding"}
_NAME_VALUES = {"key", "new_key", "ns", "sid", "k_sid", "v_sid", "index", "slot_id", "id"}


def _blob(rng: Random) -> bytes:
    kind = rng.random()
    if kind < 0.02:
        return bytes(rng.choice((65_536, 65_537, 70_000, 200_000)))
    if kind < 0.2:
        return bytes(3072)
    return rng.choice((b"", b"abcd", bytes(8), bytes(16), bytes(32), rng.randbytes(64)))


def _leaves(rng: Random) -> bytes:
    leaf: dict[str, object] = {"k": 8, "v": rng.choice((0, 8)), "heads": 2, "format": "fp16"}
    if rng.random() < 0.5:
        value: object = rng.choice((None, [], {}, -1, 1e308, True, "\ud800", 10**30, "raw:9"))
        leaf[rng.choice(("k", "v", "heads", "format", "k_format"))] = value
    leaves: object = [leaf] * rng.choice((0, 1, 2, 2, 1025))
    return json.dumps(rng.choice((leaves, leaves, leaf, 7))).encode()


def _value(rng: Random, name: str) -> bytes:
    if rng.random() < 0.06:
        return rng.choice(NUMBERS if rng.random() < 0.6 else _HOSTILE)
    if name in _WORDS:
        return rng.choice(_WORDS[name])
    if name in _NAME_VALUES:
        return rng.choice(_NAMES)
    if name in _FORMAT_NAMES:
        return rng.choice(_FORMATS)
    if name in _BLOBS:
        return _blob(rng)
    if name == "json":
        return _leaves(rng)
    if name in ("value", "field", "item", "member", "message", "text"):
        return rng.choice((b"a", b"b", b"12", b"", b"\r\n", _blob(rng)))
    return rng.choice(_SMALL)


def _words(rng: Random, node: Node) -> list[bytes]:
    """Words that a node of a command's syntax allows, more or less."""
    if node.optional and rng.random() < 0.6:
        return []
    out: list[bytes] = []
    for _ in range(rng.choice((1, 1, 2, 3)) if node.multiple else 1):
        if node.kind == "word":
            out.append(node.name.encode())
        elif node.kind == "value":
            out.append(_value(rng, node.name))
        elif node.kind == "choice":
            out += _words(rng, rng.choice(node.parts))
        else:
            for part in node.parts:
                out += _words(rng, part)
    return out


_SYNTAX = {name: parse(command.syntax) for name, command in TABLE.items()}


def _command(rng: Random, command: Command) -> Words:
    name = command.name.encode()
    words = [name if rng.random() < 0.9 else name.lower(), *_words(rng, _SYNTAX[name])]
    kind = rng.random()
    if kind < 0.03:
        words = words[: rng.randint(1, len(words))]
    elif kind < 0.06:
        words.insert(rng.randint(1, len(words)), _value(rng, "value"))
    elif kind < 0.08:
        rng.shuffle(words)
    return tuple(words)


def _number(n: int) -> bytes:
    return b"%d" % n


def _attended(rng: Random, sid: bytes) -> tuple[Words, ...]:
    """ATTEND.PREFIX.* on two heads of 32 values; any bits are floats."""
    at, row = (sid, b"0"), rng.randbytes(256)
    auto = (b"2", b"32", b"1", b"2", b"2")
    return (
        (b"ATTEND.PREFIX.STORE", *at, b"2", b"3", b"32", row * 3, row * 3),
        (b"ATTEND.PREFIX.QUERY", *at, b"2", b"32", b"1", row * rng.randint(1, 3), b"2"),
        (b"ATTEND.PREFIX.QUERY_FUSED", *at, b"2", b"32", b"1", b"2", row, row, row, b"\x00\x01"),
        (b"ATTEND.PREFIX.QUERY_SPARSE", *at, b"2", b"32", b"1", row, bytes(8), b"\1\0\0\0" * 2),
        (b"ATTEND.PREFIX.QUERY_SPARSE_AUTO", *at, *auto, row, b"", b"-1", b"1"),
        (b"ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", *at, *auto, b"1", row, row, row, b""),
    )


def _sensible(rng: Random) -> Words:
    """Commands whose parts fit together, so that there is something to work on."""
    ns, side = rng.choice((b"n1", b"n2")), rng.choice((b"_pk", b"_pv"))
    layer, rows, start = rng.randrange(3), rng.choice((1, 2, 5)), rng.choice((0, 2, 9))
    sid = rng.choice((b"n1", b"n2"))
    place = (_number(layer), _number(start), _number(rows))
    kinds: tuple[Words, ...] = (
        (b"KV.PREFIX.REGISTER", ns, b"8", b"fp16", b"HEADS", b"2", b"BLOCKS", b"4", b"1", bytes(8)),
        (b"V.CREATE", ns + side, b"8", b"VQUANT", b"fp16"),
        (b"V.STOREBATCH", ns + side, *place, rng.randbytes(rows * 16), b"FMT", b"STORED"),
        (b"V.STOREBATCH", ns + side, *place, bytes(rows * 32)),
        (b"V.FETCH", ns + side, b"0", b"RANGE", b"0", _number(rows + start)),
        (b"V.FETCH", ns + side, b"BATCH", b"0", b"9", b"2", b"FMT", b"STORED", b"LAYOUT", b"HND"),
        (b"V.EXPORT", ns + b"_pk", ns + b"_pv", b"0", b"1", b"1", b"2", b"4"),
        (b"SSM.PREFIX.STORE", ns, _number(layer), rng.randbytes(40)),
        (b"ATTEND.CREATE", sid, b"4", b"2"),
        (b"ATTEND.STORE", sid, b"0", b"1", bytes(16), bytes(8)),
        (b"ATTEND.QUERY", sid, b"0", b"3", bytes(16), b"WITHDIST"),
        (b"ATTEND.QUERYBATCH", b"1", b"2", b"4", b"1", bytes(16), bytes(32), bytes(32)),
        *_attended(rng, sid),
        (b"KV.STORE", sid, rng.randbytes(4) * 768, b"blob"),
        (b"STATE.ALLOC", sid, b"64", b"MODE", b"RING"),
        (b"STATE.WRITE", sid, _number(start), b"data"),
        (b"MULTI",),
        (b"SET", b"k", b"v"),
        (b"EXEC",),
        (b"KV.PREFIX.LONGEST", b"n1", bytes(16)),
    )
    return rng.choice(kinds)


def encoded(words: Words) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        parts.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(parts)


_INLINE = (
    *(b"PING\r\n", b"\r\n", b"\n", b'SET k "a\\x00\\n b"\r\n', b"GET 'k'\n", b"ECHO a\0b\r\n"),
    *(b"EXISTS k k k\r\n", b"DEL k" + b" k" * 2000 + b"\r\n"),
)
#: lines that end their connection
_WRONG_INLINE = (b'ECHO "open\r\n', b'ECHO "a"b\r\n', b"x" * 66_000)


_COMMON = [c for c in TABLE.values() if c.name not in LEFT_OUT | _RARE]
_UNCOMMON = [c for c in TABLE.values() if c.name in _RARE]


def request(rng: Random) -> bytes:
    """One request, well formed or nearly so."""
    kind = rng.random()
    if kind < 0.30:
        return encoded(_sensible(rng))
    if kind < 0.32:
        return rng.choice(_INLINE if rng.random() < 0.99 else _WRONG_INLINE)
    if kind < 0.325:
        return rng.choice((b"*0\r\n", b"*-1\r\n", b"*1\r\n$0\r\n\r\n", encoded((b"NOBODY", b"x"))))
    if kind < 0.335:
        return encoded(_command(rng, rng.choice(_UNCOMMON)))
    command = rng.choice(_COMMON)
    if command.name == "QUIT" and rng.random() < 0.9:
        command = TABLE[b"PING"]
    return encoded(_command(rng, command))


# -- mutations -------------------------------------------------------------------

_LENGTHS = re.compile(rb"[*$]\d+\r\n")


def change_length(rng: Random, data: bytes) -> bytes:
    """Another number behind a ``*`` or ``$``."""
    headers = list(_LENGTHS.finditer(data))
    if not headers:
        return data
    found = rng.choice(headers)
    near = b"%d" % (int(found[0][1:-2]) + rng.choice((-1, 1, 2)))
    number = rng.choice((*NUMBERS, near, near, near))
    return data[: found.start() + 1] + number + data[found.end() - 2 :]


def change_line_end(rng: Random, data: bytes) -> bytes:
    at = data.rfind(b"\r\n", 0, rng.randint(2, len(data) + 2))
    ending = rng.choice((b"\n", b"\r", b"", b"\r\n\r\n", b"\n\r", b" \r\n"))
    return data[:at] + ending + data[at + 2 :] if at >= 0 else data


MUTATIONS: tuple[Mutation, ...] = (*PLAIN, change_length, change_length, change_line_end)

# -- what bytes call for ---------------------------------------------------------

_MAX_BULK, _MAX_COMMAND, _MAX_ARGS, _MAX_INLINE = 512 << 20, 1 << 30, 1 << 20, 64 << 10
_LONGEST_HEADER = 32
_QUIT = b"QUIT"


class _Wrong(Exception):
    """A protocol error."""


class _Half(Exception):
    """A request that is not there to its end."""


def expected(data: bytes) -> Expected:
    """What the server has to answer to these bytes, read by the protocol's own rules."""
    at = replies = 0
    while at < len(data):
        try:
            words, at = _array(data, at) if data[at] == 42 else _line(data, at)
        except _Wrong:
            return Expected(replies, ends=True, explains=True)
        except _Half:
            return Expected(replies, whole=False)
        if words:
            replies += 1
            if len(words) == 1 and words[0].upper() == _QUIT:
                return Expected(replies, ends=True)
    return Expected(replies)


def first_words(data: bytes) -> list[bytes]:
    """The first word of a request, if it is whole."""
    try:
        words, _ = _array(data, 0) if data[:1] == b"*" else _line(data, 0)
    except (_Wrong, _Half):
        return []
    return words[:1]


def _header(data: bytes, at: int, longest: int) -> tuple[bytes, int]:
    """The digits of a header and where it ends."""
    end = data.find(b"\r\n", at)
    if 0 <= end - at <= longest:
        return data[at + 1 : end], end + 2
    if len(data) - at > longest:
        raise _Wrong
    raise _Half


def _decimal(digits: bytes) -> int:
    if not re.fullmatch(rb"0|[1-9][0-9]*", digits):
        raise _Wrong
    return int(digits)


def _array(data: bytes, at: int) -> tuple[list[bytes], int]:
    # its line end is within the first 32 bytes, that of a bulk string begins behind them at most
    digits, at = _header(data, at, _LONGEST_HEADER - 2)
    count = 0 if re.fullmatch(rb"-[0-9]+", digits) else _decimal(digits)
    if count > _MAX_ARGS:
        raise _Wrong
    words: list[bytes] = []
    total = 0
    for _ in range(count):
        if at == len(data):
            raise _Half
        if data[at] != 36:
            raise _Wrong
        digits, at = _header(data, at, _LONGEST_HEADER)
        length = _decimal(digits)
        total += length
        if length > _MAX_BULK or total > _MAX_COMMAND:
            raise _Wrong
        end = at + length
        if len(data) < end + 2:
            raise _Half
        if data[end : end + 2] != b"\r\n":
            raise _Wrong
        words.append(data[at:end])
        at = end + 2
    return words, at


def _line(data: bytes, at: int) -> tuple[list[bytes], int]:
    end = data.find(b"\n", at)
    if (len(data) if end < 0 else end) - at > _MAX_INLINE:
        raise _Wrong
    if end < 0:
        raise _Half
    try:
        return split_inline(data[at:end].removesuffix(b"\r")), end + 1
    except ProtocolError:
        raise _Wrong from None


# -- replies ---------------------------------------------------------------------


class Replies:
    """Counts whole replies at the beginning of a growing buffer."""

    def __init__(self) -> None:
        self.count = 0
        self._at = 0
        self._open = 0  # values that the reply under way still lacks

    def update(self, data: bytearray) -> int:
        """How many whole replies there are. Raises AssertionError for what is no reply."""
        find, at, left = data.find, self._at, self._open
        while True:
            end = find(b"\r\n", at)
            if end < 0:
                break
            left = left or 1
            kind = data[at]
            if kind in b"$*%~":
                n = int(data[at + 1 : end])
                if kind == 36:
                    if n >= 0:
                        end += n + 2
                        if len(data) < end + 2:
                            break
                        assert data[end : end + 2] == b"\r\n", "a bulk string without its end"
                elif n > 0:
                    left += n if kind != 37 else 2 * n
            else:
                assert kind in b"+-:,_#", f"no reply: {bytes(data[at : at + 60])!r}"
            at = end + 2
            left -= 1
            if not left:
                self.count += 1
            self._at, self._open = at, left
        return self.count
