"""What the table says of a command is true, complete, and the same everywhere."""

from __future__ import annotations

import os
import pty
import select
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.server import commands
from pion_vllm_mlx.server.command import TABLE, Command
from pion_vllm_mlx.server.command_docs import manual
from pion_vllm_mlx.server.command_syntax import documented, fits, parse
from tests.conftest import RunningServer
from tests.server.wire import Status, Wire

assert commands.__all__
ROOT = Path(__file__).parents[2]


def test_the_manual_in_docs_is_the_one_of_the_table() -> None:
    written = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == manual(TABLE.values()), "make docs writes it anew"


@pytest.mark.parametrize("entry", TABLE.values(), ids=lambda entry: entry.name)
def test_the_words_of_a_command_fit_its_arity(entry: Command) -> None:
    assert fits(parse(entry.syntax), entry.arity), (entry.arity, entry.syntax)
    assert entry.summary.endswith(".") and entry.since


@pytest.mark.parametrize(
    ("syntax", "arity", "fit"),
    [
        ("", 1, True),
        ("", 2, False),
        ("key", 2, True),
        ("key [count]", 2, False),
        ("key [count]", -2, True),
        ("key...", 2, False),
        ("(a b)...", -3, True),
        ("(a b)...", -4, False),
        ("x (a|B c d)", 3, False),
        ("x (a|B c d)", -3, True),
    ],
)
def test_a_syntax_that_does_not_fit_is_found(syntax: str, arity: int, fit: bool) -> None:
    assert fits(parse(syntax), arity) is fit


@pytest.mark.parametrize("syntax", ["key [", "key ]", "(a", "a)", "[a)", "a, b", "a*"])
def test_a_text_that_is_no_syntax_is_refused(syntax: str) -> None:
    with pytest.raises(ValueError, match="bracket|syntax"):
        parse(syntax)


def plain(reply: Any) -> Any:
    """A reply in RESP2 as text; flat maps stay lists."""
    if isinstance(reply, bytes):
        return reply.decode()
    return [plain(item) for item in reply] if isinstance(reply, list) else reply


def test_arguments_read_as_redis_describes_them() -> None:
    (key, _, condition, get, ending) = documented(parse("key value [NX|XX] [GET] [EX seconds]"))
    assert key == [("name", "key"), ("type", "key")]
    assert dict(condition)["type"] == "oneof" and dict(condition)["flags"] == ["optional"]
    assert dict(get) == {"name": "get", "type": "pure-token", "token": "GET", "flags": ["optional"]}
    wanted = {"name": "seconds", "type": "integer", "token": "EX", "flags": ["optional"]}
    assert dict(ending) == wanted
    (pairs,) = documented(parse("(field value)..."))
    assert dict(pairs)["type"] == "block" and dict(pairs)["flags"] == ["multiple"]
    assert [dict(inner)["name"] for inner in dict(pairs)["arguments"]] == ["field", "value"]


def test_command_docs_has_arguments_since_and_extension(wire: Wire) -> None:
    docs = wire.ask("COMMAND", "DOCS")
    names = [name.decode() for name in docs[::2]]
    assert sorted(names) == sorted(entry.name.lower() for entry in TABLE.values())
    for name, about in zip(names, docs[1::2], strict=True):
        fields = dict(zip(*[iter(plain(about))] * 2, strict=True))
        entry = TABLE[name.upper().encode()]
        assert fields["since"] == entry.since and fields["summary"] == entry.summary
        assert ("extension" in fields.get("doc_flags", [])) == entry.extension
        assert bool(fields.get("arguments")) == bool(entry.syntax)


def marked(arguments: Any) -> Iterator[str]:
    """The tokens of arguments that are flagged as extensions."""
    for argument in arguments:
        fields = dict(argument)
        if "extension" in fields.get("flags", []):
            yield fields["token"]
        yield from marked(fields.get("arguments", []))


@pytest.mark.parametrize("entry", TABLE.values(), ids=lambda entry: entry.name)
def test_words_that_are_extensions_are_marked_wherever_they_stand(entry: Command) -> None:
    found = list(marked(documented(parse(entry.syntax), entry.extensions)))
    assert set(found) == set(entry.extensions)
    shown = f"extension {' '.join(entry.extensions)}, since"
    assert (shown in manual([entry])) is bool(entry.extensions)
    assert not list(marked(documented(parse(entry.syntax))))


def flags_in(reply: Any) -> Iterator[Any]:
    """Every flag inside of a reply."""
    if not isinstance(reply, list):
        return
    for name, value in zip(reply, reply[1:], strict=False):
        if name in (b"flags", b"doc_flags") and isinstance(value, list):
            yield from value
    for item in reply:
        yield from flags_in(item)


def test_flags_are_simple_strings_as_in_redis(wire: Wire) -> None:
    flags = list(flags_in(wire.ask("COMMAND", "DOCS")))
    assert {str(flag) for flag in flags} == {"optional", "multiple", "extension"}
    assert all(isinstance(flag, Status) for flag in flags)


def test_docs_of_unknown_names_are_left_out(wire: Wire) -> None:
    assert wire.ask("COMMAND", "DOCS", "nosuch") == []
    assert wire.ask("COMMAND", "DOCS", "nosuch", "get", "GET")[::2] == [b"get"]
    assert wire.ask("COMMAND", "INFO", "nosuch", "ping")[0] is None


@pytest.mark.parametrize("protocol", ["-2", "-3"])
def test_redis_cli_runs_without_a_command(
    shared: RunningServer, tmp_path: Path, protocol: str
) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    words = ["redis-cli", protocol, "-p", str(shared.port)]
    environment = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(words[0], words, environment)
    try:
        said = talk(terminal, b"> ", b"ping\n")
        said += talk(terminal, b"PONG", b"exit\n")
        assert b"PONG" in said, said
    finally:
        os.close(terminal)
        status = os.waitpid(pid, 0)[1]
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) != 6, said


def talk(terminal: int, until: bytes, answer: bytes) -> bytes:
    """What a program prints up to some words, or its end; it is then answered."""
    said, ends_at = b"", time.monotonic() + 20
    while until not in said and time.monotonic() < ends_at:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                more = os.read(terminal, 4096)
            except OSError:  # it has ended
                return said
            said += more
            if not more:
                return said
    os.write(terminal, answer)
    return said
