"""Inline commands are split by the rules of Redis."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import ProtocolError
from pion_vllm_mlx.wire.resp import split_inline
from tests.redis_server import running_redis

CASES: list[tuple[bytes, list[bytes]]] = [
    (b"", []),
    (b"  \t ", []),
    (b"ECHO  a", [b"ECHO", b"a"]),
    (b'ECHO "a b"', [b"ECHO", b"a b"]),
    (b'ECHO ""', [b"ECHO", b""]),
    (b"ECHO ''", [b"ECHO", b""]),
    (rb'ECHO "\x41\n\r\t\b\a\\\"\q"', [b"ECHO", b'A\n\r\t\b\a\\"q']),
    (rb'ECHO "\xZZ\x4"', [b"ECHO", b"xZZx4"]),
    (rb"ECHO 'it\'s \n'", [b"ECHO", rb"it's \n"]),
    (rb'''ECHO "it\'s"''', [b"ECHO", b"it's"]),
    (b'ECHO ab"c d"', [b"ECHO", b"abc d"]),
    (b"ECHO \xff\xfe", [b"ECHO", b"\xff\xfe"]),
]
UNBALANCED = [b'ECHO "a', b"ECHO 'a", b'ECHO "a"b', b"ECHO 'a'b", b'ECHO "a\\"', b'ECHO "']


@pytest.mark.parametrize(("line", "words"), CASES)
def test_a_line_becomes_words(line: bytes, words: list[bytes]) -> None:
    assert split_inline(line) == words


@pytest.mark.parametrize("line", UNBALANCED)
def test_unbalanced_quotes_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="unbalanced quotes"):
        split_inline(line)


@pytest.fixture(scope="module")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with running_redis(tmp_path_factory.mktemp("r")) as real:
        yield real.socket


@pytest.mark.parametrize(("line", "words"), [case for case in CASES if len(case[1]) == 2])
def test_redis_splits_the_same_way(redis_socket: Path, line: bytes, words: list[bytes]) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(redis_socket))
        sock.sendall(line + b"\r\n")
        expected = b"$%d\r\n%b\r\n" % (len(words[1]), words[1])
        assert sock.recv(1000) == expected


@pytest.mark.parametrize("line", UNBALANCED)
def test_redis_refuses_the_same_lines(redis_socket: Path, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(redis_socket))
        sock.sendall(line + b"\r\n")
        assert sock.recv(1000).startswith(b"-ERR Protocol error: unbalanced quotes in request")
