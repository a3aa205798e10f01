"""Patterns of KEYS and SCAN: what they match, and that nobody waits for them."""

from __future__ import annotations

import random
import select

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.keyspace.glob import MAX_PATTERN_BYTES, matcher
from tests.conftest import RunningServer
from tests.server.wire import Refusal, Wire, request

#: letters of patterns, each with the bytes that it lets through.
LETTERS = {
    b"a": b"a",
    b"b": b"b",
    b"?": b"abc-^]",
    b"[ab]": b"ab",
    b"[^a]": b"bc-^]",
    b"[a-c]": b"abc",
    b"[c-a]": b"abc",
    b"[\\]\\-]": b"]-",
    b"[]": b"",
    b"\\^": b"^",
}


def oracle(letters: list[bytes], name: bytes) -> bool:
    """By trying every run for every star."""
    if not letters:
        return not name
    if letters[0] == b"*":
        return any(oracle(letters[1:], name[at:]) for at in range(len(name) + 1))
    return bool(name) and name[0] in LETTERS[letters[0]] and oracle(letters[1:], name[1:])


def test_a_pattern_matches_what_trying_everything_matches() -> None:
    rng = random.Random(7)
    choices = [*LETTERS, b"*", b"*", b"*"]
    seen = {True: 0, False: 0}
    for _ in range(6000):
        letters = rng.choices(choices, k=rng.randint(0, 6))
        name = bytes(rng.choices(b"aaabbc-^]", k=rng.randint(0, 7)))
        wanted = oracle(letters, name)
        seen[wanted] += 1
        assert matcher(b"".join(letters))(name) is wanted, (letters, name)
    assert min(seen.values()) > 500


def test_a_pattern_of_any_bytes_reads_a_name_once_however_many_stars_it_has() -> None:
    name = b"ab" * 30_000
    assert matcher(b"*[^a]" * 200)(name)
    assert not matcher(b"*[^a]" * 200 + b"c")(name)
    assert not matcher(b"a*" * 500 + b"c")(name)


@pytest.mark.parametrize("pattern", [b"[^a]" * 16_000, b"a*" * 30_000])
def test_a_pattern_that_is_too_long_is_refused_by_its_length(wire: Wire, pattern: bytes) -> None:
    for words in (("KEYS", pattern), ("SCAN", 0, "MATCH", pattern)):
        answer = wire.ask(*words)
        assert isinstance(answer, Refusal)
        assert answer == f"ERR pattern is longer than {MAX_PATTERN_BYTES} bytes"
    assert wire.ask("KEYS", b"a" * MAX_PATTERN_BYTES) == []
    with pytest.raises(CommandError):
        matcher(pattern)


def test_others_are_served_while_long_names_are_matched(wire: Wire, shared: RunningServer) -> None:
    tails = [b"%03d" % number for number in range(300)]
    for tail in tails:
        wire.ok("SET", b"x" * 30_000 + tail, "")
    pattern = b"*[0-9][0-9]7*"
    with Wire.tcp(shared.port) as other:
        for words in (("KEYS", pattern), ("SCAN", 0, "MATCH", pattern, "COUNT", 1000)):
            wire.send(request(*words))
            for _ in range(3):
                assert other.ask("PING") == "PONG"
            assert not select.select([wire.sock], [], [], 0)[0], "PING waited for the pattern"
            found = wire.reply()
            names = found[1] if words[0] == "SCAN" else found
            assert sorted(name[-3:] for name in names) == [t for t in tails if t[-1:] == b"7"]


def test_a_transaction_sees_the_keys_of_one_moment(wire: Wire) -> None:
    for number in range(3):
        wire.ok("SET", b"y" * 9_000 + b"%d" % number, "")
    wire.ok("MULTI")
    for words in (("KEYS", "*[01]"), ("SCAN", 0, "MATCH", "*[01]"), ("SET", "z", 1)):
        assert wire.ask(*words) == "QUEUED"
    keys, (cursor, scanned), _ = wire.ask("EXEC")
    assert cursor == b"0" and sorted(keys) == sorted(scanned) and len(keys) == 2
