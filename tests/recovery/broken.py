"""Broken copies of a data folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from pion_vllm_mlx.server.store import framing
from tests.recovery.driving import Content, Driver, Options

VSTORE_WAL, SSM_WAL = "pion.vstore.wal.0", "pion.ssm.wal.0"
MAGICS = {VSTORE_WAL: framing.VSTORE_WAL, SSM_WAL: framing.SSM_WAL}
SALVAGE = Options(salvage=True)


class Copies:
    """Copies of one folder, each in the same place, broken in turn."""

    def __init__(self, original: Path) -> None:
        self.original = original
        self.folder = original.with_name(original.name + "-broken")

    def fresh(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.original, self.folder)
        return self.folder

    def cut(self, name: str, size: int) -> Path:
        folder = self.fresh()
        with (folder / name).open("r+b") as file:
            file.truncate(size)
        return folder

    def flipped(self, name: str, position: int) -> Path:
        folder = self.fresh()
        with (folder / name).open("r+b") as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            # another bit from byte to byte
            file.write(bytes([byte ^ (1 << position % 8)]))
        return folder


def boundaries(path: Path) -> list[int]:
    """The sizes of a WAL after its header and after each of its records."""
    found = framing.scan(memoryview(path.read_bytes()), MAGICS[path.name], path.name)
    assert found.damage is None and not found.torn_bytes
    ends = [frame.payload_offset + len(frame.payload) for frame in found.frames]
    return [framing.HEADER_BYTES, *ends]


def history(copies: Copies, name: str) -> list[Content]:
    """What the folder holds when its log ends after no, one, two … records."""
    contents = []
    for size in boundaries(copies.original / name):
        with Driver(copies.cut(name, size)) as driver:
            contents.append(driver.content())
    return contents


def damaged_files(folder: Path) -> Iterator[Path]:
    return folder.glob("*.damaged-*")


def content_of(folder: Path, options: Options | None = None) -> Content:
    with Driver(folder, options) as driver:
        return driver.content()


Check = Callable[[Content], bool]
