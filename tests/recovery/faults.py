"""Make the N-th call of the system fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

#: what a store asks the system to change.
CALLS = ("replace", "fsync", "pwrite", "pwritev", "ftruncate", "open", "unlink")


class Faults:
    """Counts calls, and fails the one numbered ``fail_at`` (and, if asked, all after it)."""

    def __init__(self, fail_at: int, forever: bool = False) -> None:
        self.fail_at = fail_at
        self.forever = forever
        self.made = 0
        self.failed: list[str] = []

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number, self.made = self.made, self.made + 1
            if number == self.fail_at or (self.forever and number > self.fail_at):
                self.failed.append(name)
                if name in ("pwrite", "pwritev") and len(args[1]) > 1:
                    # a full disk takes a part
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call


@contextmanager
def failing(fail_at: int, forever: bool = False) -> Iterator[Faults]:
    """Within the block, the store's call number ``fail_at`` fails with ENOSPC."""
    faults = Faults(fail_at, forever)
    with ExitStack() as stack:
        for name in CALLS:
            wrapped = faults.wrap(name, getattr(os, name))
            stack.enter_context(mock.patch.object(os, name, wrapped))
        yield faults


@contextmanager
def counting(name: str) -> Iterator[list[int]]:
    """Within the block, the inode of the file of every call of ``os.<name>``."""
    seen: list[int] = []
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(os.fstat(args[0]).st_ino)
        return real(*args, **kwargs)

    with mock.patch.object(os, name, call):
        yield seen
