"""What a worker's files occupy beside its segments: logs, snapshots, exports, leftovers.

Looked at now and then; the logs, which grow with every write, are asked for their sizes
each time.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pion_vllm_mlx.server.store.files import TEMPORARY

if TYPE_CHECKING:
    from pion_vllm_mlx.server.store.wal import Wal

#: so old may be what was seen of files that change at a save or an export.
FRESH_SECONDS = 0.25
#: the same for what no server writes to meanwhile.
_LEFT_FRESH_SECONDS = 5.0
_OURS = ("pion.", "pion-")
_WORKER = re.compile(r"pion\.[a-z.]+\.(\d+)(?:\..*)?")
_MAIN_FILE = re.compile(r"pion\.(?:vstore|ssm|segments|snapshot|wal)(?:\.wal)?\.(\d+)")
_EXPORT = re.compile(r"export-[0-9a-f]+-(\d+)-.*")


class FolderUse:
    """Bytes on disk of what is one worker's own; worker 0 counts what belongs to none, too.

    Files of workers that an earlier start had are dealt out among those of this one.
    Not counted: segments, what a save is writing and will replace, and files whose names are
    not the server's, such as copies that ``SAVE path`` wrote.
    """

    def __init__(self, folder: Path, worker: int, workers: int = 1) -> None:
        self.logs: list[Wal] = []
        self._folder, self._worker = folder, worker
        self._workers = max(workers, worker + 1)
        self._left_seen, self._left = float("-inf"), 0
        self._seen = float("-inf")
        self._fixed = self._snapshots = self._most_logged = 0

    def look_again(self) -> None:
        """Something was written or deleted: what was seen is old."""
        self._seen = float("-inf")

    def total(self) -> int:
        """Bytes of everything."""
        self._look()
        return self._fixed + self._snapshots + self._log_bytes()

    def of_prefixes(self) -> int:
        """Bytes that would go, at the next save, if every prefix went."""
        self._look()
        logs = sum(log.size for log in self.logs if "pion.wal." not in log.path.name)
        return self._snapshots + logs

    def _log_bytes(self) -> int:
        return sum(log.size for log in self.logs)

    def _look(self) -> None:
        now, log_bytes = time.monotonic(), self._log_bytes()
        shorter = log_bytes < self._most_logged  # what a log gave up lies in a snapshot now
        self._most_logged = log_bytes
        if now - self._seen < FRESH_SECONDS and not shorter:
            return
        self._seen = now
        logs = {log.path.name for log in self.logs}
        self._fixed, self._snapshots = self._left_bytes(now), 0
        for name, nbytes in self._files():
            if name in logs or name.endswith(TEMPORARY):
                continue
            if name.startswith(("pion.vstore.", "pion.ssm.", "export-")):
                self._snapshots += nbytes
            else:
                self._fixed += nbytes

    def _files(self) -> Iterator[tuple[str, int]]:
        """Names and bytes on disk of the files that count here, the segments left out."""
        for entry in _entries(self._folder):
            if not entry.name.startswith(_OURS):
                continue
            if entry.name.startswith("pion.segments."):
                if ".damaged-" in entry.name and self._is_mine(_WORKER.fullmatch(entry.name)):
                    for segment in _entries(Path(entry.path)):
                        yield from _occupied(segment)
                continue
            if entry.name == "pion-export":
                for export in _entries(Path(entry.path)):
                    if self._is_mine(_EXPORT.fullmatch(export.name)):
                        yield from _occupied(export)
            elif self._is_mine(_WORKER.fullmatch(entry.name)):
                yield from _occupied(entry)

    def _is_mine(self, match: re.Match[str] | None) -> bool:
        return self._worker == (int(match[1]) if match else 0)

    def _left_bytes(self, now: float) -> int:
        """Bytes of this worker's part of what workers have left that do not run."""
        if now - self._left_seen < _LEFT_FRESH_SECONDS:
            return self._left
        self._left_seen, self._left = now, 0
        for entry in _entries(self._folder):
            match = _WORKER.fullmatch(entry.name)
            number = int(match[1]) if match else 0
            if number >= self._workers and number % self._workers == self._worker:
                inside = _entries(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else []
                for each in (entry, *inside):
                    self._left += sum(nbytes for _, nbytes in _occupied(each))
        return self._left


def left_behind(folder: Path, workers: int) -> list[int]:
    """The numbers of workers that have files here with something in them, but do not run."""
    found = set()
    for entry in _entries(folder):
        match = _MAIN_FILE.fullmatch(entry.name)
        if match is None or int(match[1]) < workers:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if _entries(Path(entry.path)) if is_folder else any(_occupied(entry)):
            found.add(int(match[1]))
    return sorted(found)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _occupied(entry: os.DirEntry[str]) -> Iterator[tuple[str, int]]:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # renamed or deleted meanwhile
        return
    if stat.S_ISREG(status.st_mode):
        yield entry.name, status.st_blocks * 512
