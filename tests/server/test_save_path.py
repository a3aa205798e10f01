"""KV.PREFIX.SAVE PATH replaces a portable copy, and no other file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.conftest import RunningServer
from tests.server.wire import Refusal, Wire

ROW = struct.pack("<4f", 1, 2, 3, 4)
REFUSED = "names a file that is not a portable copy; it is not replaced"


@pytest.fixture
def stored(wire: Wire, ns: str) -> str:
    """A namespace with something to save."""
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp32")
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 1, ROW)
    return ns


@pytest.mark.parametrize("content", [b"", b"short", b"of somebody else " * 1000])
def test_a_file_of_somebody_else_is_not_replaced(
    wire: Wire, shared: RunningServer, stored: str, content: bytes
) -> None:
    path = shared.dir / f"{stored}.txt"
    path.write_bytes(content)
    answer = wire.ask("KV.PREFIX.SAVE", path.name)
    assert isinstance(answer, Refusal) and answer.endswith(REFUSED)
    assert path.read_bytes() == content


def test_what_a_link_names_is_not_replaced_nor_the_link(
    wire: Wire, shared: RunningServer, stored: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    wire.ok("KV.PREFIX.SAVE", "first")
    kept.write_bytes((shared.dir / "first").read_bytes())
    link = shared.dir / f"{stored}.link"
    link.symlink_to(kept)
    assert REFUSED in wire.ask("KV.PREFIX.SAVE", link.name)
    assert link.is_symlink() and kept.read_bytes() == (shared.dir / "first").read_bytes()


def test_a_copy_replaces_an_older_copy(wire: Wire, shared: RunningServer, stored: str) -> None:
    wire.ok("KV.PREFIX.SAVE", "backup")
    before = (shared.dir / "backup").read_bytes()
    wire.ok("V.STOREBATCH", stored + "_pk", 0, 1, 1, ROW)
    wire.ok("KV.PREFIX.SAVE", "backup")
    after = (shared.dir / "backup").read_bytes()
    assert after != before and after.endswith(b"PIONPC01")


def test_no_file_beside_the_copy_is_written_over(
    wire: Wire, shared: RunningServer, stored: str
) -> None:
    """Also while it is written, when it has another name."""
    beside = shared.dir / f"{stored}.bin.tmp"
    beside.write_bytes(b"of somebody else")
    wire.ok("KV.PREFIX.SAVE", f"{stored}.bin")
    assert beside.read_bytes() == b"of somebody else"
    assert not list(shared.dir.glob(f"pion.{stored}*"))
