"""A refused command says why, changes nothing, and leaves the connection in step."""

from __future__ import annotations

import json
import struct

import pytest

from tests.server.wire import Refusal, Wire, Word, fingerprint, refuse, request

HUGE = 99_999_999_999_999_999_999
ROW = struct.pack("<4f", 1, -2, 0.5, 0)


@pytest.fixture
def stored(wire: Wire, ns: str) -> str:
    """A namespace of width 4 with one fp16 row in layer 0 of both sides."""
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    for side in ("_pk", "_pv"):
        wire.ok("V.STOREBATCH", ns + side, 0, 0, 1, ROW)
    return ns


NOT_NUMBERS: list[Word] = ["abc", "-5", "1e3", HUGE, "", " 1", "+1", "0x10", "1.0", b"\xd9\xa1"]


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_only_plain_decimals_are_numbers(wire: Wire, stored: str, bad: Word) -> None:
    sid = stored + "_pk"
    for words in (
        ("KV.PREFIX.REGISTER", "new", bad, "fp16"),
        ("KV.PREFIX.REGISTER", "new", 4, "fp16", "PREFILL_MS", bad),
        ("KV.PREFIX.REGISTER", "new", 4, "fp16", "HEADS", bad),
        ("KV.PREFIX.LOOKUP", stored, "TOKENS", bad),
        ("KV.PREFIX.LOOKUP", stored, "PREFILL_MS", bad),
        ("V.CREATE", "new", bad),
        ("V.STOREBATCH", sid, bad, 0, 1, ROW),
        ("V.STOREBATCH", sid, 0, bad, 1, ROW),
        ("V.STOREBATCH", sid, 0, 0, bad, ROW),
        ("V.STOREBATCH", sid, 0, 0, 1, ROW, "CRC", bad),
        ("V.FETCH", sid, bad, "RANGE", 0, 1),
        ("V.FETCH", sid, 0, "RANGE", bad, 1),
        ("V.FETCH", sid, 0, "RANGE", 0, bad),
        ("V.FETCH", sid, 0, bad),
        ("V.FETCH", sid, 0, 0, bad),
        ("V.FETCH", sid, "BATCH", bad, 1),
        ("V.FETCH", sid, "BATCH", 0, 1, bad),
        ("V.EXPORT", sid, sid, bad, 1, 1, 1, 4),
        ("V.EXPORT", sid, sid, 0, bad, 1, 1, 4),
        ("V.EXPORT", sid, sid, 0, 1, bad, 1, 4),
        ("V.EXPORT", sid, sid, 0, 1, 1, bad, 4),
        ("V.EXPORT", sid, sid, 0, 1, 1, 1, bad),
        ("SSM.PREFIX.STORE", "new", bad, b"x"),
        ("SSM.PREFIX.FETCH", "new", bad),
        ("SSM.PREFIX.DROP", "new", bad),
    ):
        refuse(wire, "", *words)


REFUSED: list[tuple[str, tuple[Word, ...]]] = [
    ("unknown command", ("NO.SUCH", "a", "b")),
    ("unknown command 'bad  name'", (b"bad\r\nname",)),
    ("unknown command", ("FT.CREATE", "x")),
    ("unknown command", ("AI.SEMANTIC_CACHE", "x")),
    ("unknown command", ("MOE.EXPERT", "x")),
    ("wrong number of arguments for 'echo' command", ("ECHO",)),
    ("wrong number of arguments for 'ping' command", ("PING", "a", "b")),
    ("wrong number of arguments", ("KV.PREFIX.REGISTER", "a", 4)),
    ("wrong number of arguments", ("KV.PREFIX.LOOKUP",)),
    ("wrong number of arguments", ("KV.PREFIX.DROP",)),
    ("wrong number of arguments", ("KV.PREFIX.MAP",)),
    ("wrong number of arguments", ("KV.PREFIX.EXPLAIN",)),
    ("wrong number of arguments", ("KV.PREFIX.SAVE", "a", "b")),
    ("wrong number of arguments", ("KV.PREFIX.COMMIT", "PING")),
    ("wrong number of arguments", ("KV.PREFIX.INFO", "x")),
    ("wrong number of arguments", ("V.CREATE", "a")),
    ("wrong number of arguments", ("V.STOREBATCH", "NS_pk", 0, 0, 1)),
    ("wrong number of arguments", ("V.FETCH", "NS_pk", 0)),
    ("wrong number of arguments", ("V.INFO", "a", "b")),
    ("wrong number of arguments", ("V.DROP",)),
    ("wrong number of arguments", ("V.EXPORT", "NS_pk", "NS_pv", 0, 1, 1, 1)),
    ("wrong number of arguments", ("SSM.PREFIX.STORE", "a", 0)),
    ("wrong number of arguments", ("SSM.PREFIX.FETCH", "a")),
    ("wrong number of arguments", ("SSM.PREFIX.DROP", "a", 0, 1)),
    ("unknown vquant 'int9'", ("KV.PREFIX.REGISTER", "new", 4, "int9")),
    ("", ("KV.PREFIX.REGISTER", "new", 0, "fp16")),
    ("", ("KV.PREFIX.REGISTER", "new", 65537, "fp16")),
    ("", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "PREFILL_MS", 86_400_001)),
    ("", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "PREFILL_MS")),
    ("", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "HEADS", 0)),
    ("", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "HEADS", 1, "heads", 1)),
    ("HEADS 3 does not divide kv_dim 4", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "HEADS", 3)),
    ("HEADS 8 does not divide kv_dim 4", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "HEADS", 8)),
    ("unknown option", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "EXTRA")),
    ("LEAVES", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", "{")),
    ("LEAVES", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", "[]")),
    ("LEAVES: a leaf is an object", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", "[1]")),
    ("LEAVES: a leaf is an object", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", "[{}]")),
    ("LEAVES", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", "[" * 100_000)),
    ("LEAVES", ("KV.PREFIX.REGISTER", "new", 4, "fp16", "LEAVES", b"\xff\xfe")),
    ("already exists with a different", ("KV.PREFIX.REGISTER", "NS", 8, "fp16")),
    ("already exists with a different", ("KV.PREFIX.REGISTER", "NS", 4, "int8")),
    ("already exists with a different", ("KV.PREFIX.REGISTER", "NS", 4, "fp16", "HEADS", 2)),
    ("1 to 65535 bytes", ("KV.PREFIX.REGISTER", "", 4, "fp16")),
    ("1 to 65535 bytes", ("KV.PREFIX.REGISTER", b"x" * 65536, 4, "fp16")),
    ("1 to 65532 bytes", ("KV.PREFIX.REGISTER", b"x" * 65533, 4, "fp16")),
    ("", ("KV.PREFIX.REGISTER", b"x" * 70_000, 4, "fp16")),
    ("1 to 65535 bytes", ("KV.PREFIX.LOOKUP", "")),
    ("1 to 65535 bytes", ("KV.PREFIX.DROP", "NS", "")),
    ("unknown option", ("KV.PREFIX.LOOKUP", "NS", "WHAT")),
    ("unknown option", ("KV.PREFIX.LOOKUP", "absent", "WHAT")),
    ("lacks its value", ("KV.PREFIX.LOOKUP", "NS", "TOKENS")),
    ("", ("KV.PREFIX.LOOKUP", "NS", "TOKENS", 1, "TOKENS", 1)),
    ("relative", ("KV.PREFIX.SAVE", "/etc/passwd")),
    ("relative", ("KV.PREFIX.SAVE", "../up")),
    ("relative", ("KV.PREFIX.SAVE", "a/../../up")),
    ("relative", ("KV.PREFIX.SAVE", "")),
    ("relative", ("KV.PREFIX.SAVE", b"a\0b")),
    ("unknown option", ("BGSAVE", "LATER")),
    ("path is too long", ("KV.PREFIX.SAVE", "x" * 255)),
    ("path is too long", ("KV.PREFIX.SAVE", "x" * 400 + "/y")),
    ("folder that is there", ("KV.PREFIX.SAVE", "y/" * 10_000 + "y")),
    ("invalid cursor", ("SCAN", "9" * 5000)),
    ("own files", ("KV.PREFIX.SAVE", "pion.vstore.wal.0")),
    ("own files", ("KV.PREFIX.SAVE", "./Pion.lock")),
    ("own files", ("KV.PREFIX.SAVE", "pion.segments.0/x.safetensors")),
    ("own files", ("KV.PREFIX.SAVE", "pion-export/x")),
    ("folder that is there", ("KV.PREFIX.SAVE", "no/such/folder")),
    ("already exists with a different schema", ("V.CREATE", "NS_pk", 5)),
    ("", ("V.CREATE", "new", 4, "VQUANT", "int9")),
    ("", ("V.CREATE", "new", 4, "VQUANT")),
    ("unknown option", ("V.CREATE", "new", 4, "WHAT", 1)),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW[:-1])),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW + b"x")),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 1, b"")),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 0, ROW)),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "FMT", "F16")),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "FMT", "STORED")),
    ("V.STOREBATCH: blob size", ("V.STOREBATCH", "NS_pk", 0, 0, 2**31 - 1, ROW)),
    ("V.STOREBATCH: session not found", ("V.STOREBATCH", "absent", 0, 0, 1, ROW)),
    ("layer out of range", ("V.STOREBATCH", "NS_pk", 1024, 0, 1, ROW)),
    ("", ("V.STOREBATCH", "NS_pk", 0, 2**31 - 1, 1, ROW)),
    ("FMT", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "FMT", "RAW")),
    ("FMT", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "FMT", "NATIVE")),
    ("lacks its value", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "FMT")),
    ("unknown option", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "F16")),
    ("LAYOUT", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "LAYOUT", "HND")),
    (
        "HEADS",
        ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW[:8], "FMT", "STORED", "LAYOUT", "HND"),
    ),
    ("checksum", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "CRC", 1)),
    ("", ("V.STOREBATCH", "NS_pk", 0, 0, 1, ROW, "CRC", 2**32)),
    ("V.FETCH: session not found", ("V.FETCH", "absent", 0, "RANGE", 0, 1)),
    ("V.FETCH: session not found", ("V.FETCH", "absent", 0, 1)),
    ("V.FETCH: session not found", ("V.FETCH", "absent", "BATCH", 0, 1)),
    ("end must exceed start", ("V.FETCH", "NS_pk", 0, "RANGE", 1, 1)),
    ("end must exceed start", ("V.FETCH", "NS_pk", "BATCH", 5, 1)),
    ("layer out of range", ("V.FETCH", "NS_pk", 1024, "RANGE", 0, 1)),
    ("larger than", ("V.FETCH", "NS_pk", 0, "RANGE", 0, 2**31 - 1)),
    ("larger than", ("V.FETCH", "NS_pk", "BATCH", 0, 2**31 - 1)),
    ("", ("V.FETCH", "NS_pk", 0, "RANGE", 0)),
    ("", ("V.FETCH", "NS_pk", "BATCH", 0)),
    ("", ("V.FETCH", "NS_pk", "BATCH", 0, 1, 1025)),
    ("", ("V.FETCH", "NS_pk", 0, "RANGE", 0, 1, "FMT", "RAW")),
    ("", ("V.FETCH", "NS_pk", 0, 0, "FMT", "NATIVE")),
    ("", ("V.FETCH", "NS_pk", 0, "RANGE", 0, 1, "LAYOUT", "HND")),
    ("HEADS", ("V.FETCH", "NS_pk", 0, "RANGE", 0, 1, "FMT", "STORED", "LAYOUT", "HND")),
    ("session not found", ("V.EXPORT", "absent", "NS_pv", 0, 1, 1, 1, 4)),
    ("session not found", ("V.EXPORT", "NS_pk", "absent", 0, 1, 1, 1, 4)),
    ("end must exceed start", ("V.EXPORT", "NS_pk", "NS_pv", 1, 1, 1, 1, 4)),
    ("layer 1 has no rows", ("V.EXPORT", "NS_pk", "NS_pv", 0, 1, 2, 1, 4)),
    ("stored width", ("V.EXPORT", "NS_pk", "NS_pv", 0, 1, 1, 2, 4)),
    ("has only 1 rows", ("V.EXPORT", "NS_pk", "NS_pv", 0, 2, 1, 1, 4)),
    ("", ("V.EXPORT", "NS_pk", "NS_pv", 0, 1, 0, 1, 4)),
    ("", ("V.EXPORT", "NS_pk", "NS_pv", 0, 1, 1, 1, 4, "FMT", "NATIVE")),
    ("", ("SSM.PREFIX.STORE", "new", 65536, b"x")),
    ("checksum", ("SSM.PREFIX.STORE", "new", 0, b"x", "CRC", 1)),
    ("unknown option", ("SSM.PREFIX.STORE", "new", 0, b"x", "TTL", 1)),
    ("1 to 65535 bytes", ("SSM.PREFIX.STORE", "", 0, b"x")),
    ("DB index is out of range", ("SELECT", 1)),
    ("AUTH <password> called without any password configured", ("AUTH", "pw")),
    ("", ("CONFIG", "SET", "dir", "/etc")),
    ("", ("CONFIG", "REWRITE")),
    ("", ("CLIENT", "KILL", "x")),
    ("", ("CLIENT", "SETNAME", "two words")),
    ("", ("COMMAND", "WHAT")),
    ("", ("ECHO", b"x" * (2 << 20))),
    ("", ("SHUTDOWN", "NOW")),
]


@pytest.mark.parametrize(("fragment", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refused_command_says_why_and_changes_nothing(
    wire: Wire, stored: str, fragment: str, words: tuple[Word, ...]
) -> None:
    named = [
        word.replace("NS", stored, 1) if isinstance(word, str) and word[:2] == "NS" else word
        for word in words
    ]
    refuse(wire, fragment, *named)
    assert wire.ask("V.FETCH", stored + "_pk", 0, "RANGE", 0, 1) == ROW


def test_an_unsupported_protocol_version_is_refused_and_the_old_one_stays(wire: Wire) -> None:
    answer, pong = wire.together(("HELLO", 4), ("PING",))
    assert answer == "NOPROTO unsupported protocol version" and pong == "PONG"
    assert isinstance(wire.ask("PION.STATS"), list)


NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("fmt", ["int8", "mlx4g32"])
@pytest.mark.parametrize("n", [2, 2_000, 40_000])
def test_quantized_formats_refuse_rows_that_are_not_finite(
    wire: Wire, ns: str, fmt: str, n: int
) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 64, fmt)
    row = struct.pack("<64f", *range(64))
    for value in NOT_FINITE:
        # the bad value in the last row: earlier windows are written already
        bad = row * (n - 1) + row[:-4] + struct.pack("<f", value)
        refuse(wire, "not finite", "V.STOREBATCH", ns + "_pk", 0, 0, n, bad)
    assert wire.ask("V.FETCH", ns + "_pk", 0, "RANGE", 0, n) is None


def test_a_value_beyond_the_range_of_a_stored_parameter_is_refused(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 32, "mlx4g32")
    bad = struct.pack("<32f", *([0.0] * 31 + [1e30]))
    refuse(wire, "float16", "V.STOREBATCH", ns + "_pk", 0, 0, 1, bad)


def test_long_refused_blobs_are_read_and_forgotten(wire: Wire, stored: str) -> None:
    blob = bytes(9 << 20)
    sid = stored + "_pk"
    rows = len(blob) // 8
    refuse(wire, "session not found", "V.STOREBATCH", "absent", 0, 0, 1, blob)
    refuse(wire, "blob size", "V.STOREBATCH", sid, 0, 0, 1, blob)
    refuse(wire, "layer out of range", "V.STOREBATCH", sid, 4_000, 0, 1, blob)
    refuse(wire, "layer", "V.STOREBATCH", sid, "x", 0, 1, blob)
    refuse(wire, "checksum", "V.STOREBATCH", sid, 0, 0, rows, blob, "FMT", "F16", "CRC", 5)
    refuse(wire, "FMT", "V.STOREBATCH", sid, 0, 0, rows, blob, "FMT", "F8")
    refuse(wire, "checksum", "SSM.PREFIX.STORE", stored, 0, blob, "CRC", 5)
    refuse(wire, "layer", "SSM.PREFIX.STORE", stored, "x", blob)
    refuse(wire, "unknown command", "NO.SUCH", blob)
    refuse(wire, "", "V.CREATE", "new", 4, "VQUANT", blob)
    refuse(wire, "", "KV.PREFIX.LOOKUP", blob)
    assert wire.ask("V.FETCH", sid, 0, "RANGE", 0, 1) == ROW


def test_many_long_arguments_of_one_command_do_not_wait_for_themselves(wire: Wire) -> None:
    words = ["KV.PREFIX.DROP", *(b"x" * (1 << 20) for _ in range(100))]
    refuse(wire, "", *words)


@pytest.mark.parametrize(
    "garbage",
    [
        b"*1\r\n+PING\r\n",
        b"*1\r\n$-5\r\n",
        b"*1\r\n$abc\r\n",
        b"*abc\r\n",
        b"*1\r\n$4\r\nPINGxx",
        b"*99999999999\r\n",
        b'"unbalanced\r\n',
        b"*2\r\n$4\r\nPING\r\n:5\r\n",
    ],
)
def test_malformed_requests_are_named_and_the_connection_is_closed(
    wire: Wire, garbage: bytes
) -> None:
    wire.send(request("PING") + garbage)
    assert wire.reply() == "PONG"
    assert str(wire.reply()).startswith("ERR Protocol error: ")
    assert wire.closed()


def test_what_came_before_the_garbage_is_answered(wire: Wire, ns: str) -> None:
    stored = [request("SSM.PREFIX.STORE", ns, n, b"state") for n in range(20)]
    wire.send(b"".join(stored) + b"*x\r\n" + request("PING") * 5000)
    assert [wire.reply() for _ in stored] == ["OK"] * 20
    assert str(wire.reply()).startswith("ERR Protocol error: ")
    assert wire.closed()


def test_what_came_before_too_many_words_is_answered(wire: Wire, ns: str) -> None:
    stored = [request("SSM.PREFIX.STORE", ns, n, b"state") for n in range(20)]
    words = [b"$60000\r\n" + bytes(60_000) + b"\r\n"] * 300
    wire.send(b"".join([*stored, b"*1000\r\n", *words]))
    assert [wire.reply() for _ in stored] == ["OK"] * 20
    assert wire.reply() == "ERR Protocol error: arguments are too long"
    assert wire.closed()


def test_a_bulk_string_over_the_limit_is_refused_before_it_is_read(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    wire.send(b"*6\r\n$12\r\nV.STOREBATCH\r\n$6\r\n%b\r\n" % (ns + "_pk").encode()[:6].ljust(6))
    wire.send(b"$1\r\n0\r\n$1\r\n0\r\n$1\r\n1\r\n$%d\r\n" % (600 << 20))
    assert wire.reply() == "ERR Protocol error: invalid bulk length"
    assert wire.closed()


def test_ids_are_any_bytes(wire: Wire) -> None:
    names = [bytes(range(256)), b"a|b:c d", b"\r\n", b"\0", b"_pk", b"x" * 65_532, "é🦜".encode()]
    for name in names:
        wire.ok("KV.PREFIX.REGISTER", name, 4, "fp16")
        wire.ok("V.STOREBATCH", name + b"_pk", 0, 0, 1, ROW)
        wire.ok("SSM.PREFIX.STORE", name, 7, name)
    for name in names:
        assert wire.ask("KV.PREFIX.LOOKUP", name) == "HIT"
        assert wire.ask("V.FETCH", name + b"_pk", 0, 0) == ROW
        assert wire.ask("SSM.PREFIX.FETCH", name, 7) == name
        assert json.loads(wire.ask("KV.PREFIX.EXPLAIN", name))["verdict"] == "hit"
        assert json.loads(wire.ask("KV.PREFIX.MAP", name))["segments"]
        lines = wire.ask("V.INFO", name + b"_pk").split(b"\r\n")
        assert [line for line in lines if line.startswith(b"layer_")] == [b"layer_0_tokens:1"]
    assert wire.ask("KV.PREFIX.DROP", *names) == len(names)
    for name in names:
        assert wire.ask("KV.PREFIX.LOOKUP", name) == "MISS"
        assert wire.ask("SSM.PREFIX.FETCH", name, 7) is None


def test_an_empty_store_is_acknowledged_and_changes_nothing(wire: Wire, stored: str) -> None:
    before = fingerprint(wire)
    wire.ok("V.STOREBATCH", stored + "_pk", 0, 5, 0, b"")
    assert fingerprint(wire) == before
    assert not isinstance(wire.ask("V.FETCH", stored + "_pk", 0, 0), Refusal)
