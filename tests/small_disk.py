"""A file system of a few megabytes, to be filled."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """The new ``folder`` on a file system of its own; skips the test where none can be mounted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(path: Path) -> None:
    """Writes a file until there is no room left."""
    with contextlib.suppress(OSError), path.open("wb") as file:
        while True:
            file.write(bytes(1 << 14))
            file.flush()
