"""The limit of memory: what counts, and whether it is reached.

Anonymous memory counts: rows are read and sent from files, and what the page cache holds
of them is the system's to give away. A cache may give up what it holds before anything is
refused. On Linux that is RssAnon, on macOS the physical
footprint. Allocators keep what was freed, so before anything is refused they are asked to
give it back.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import time
from typing import Protocol

from pion_vllm_mlx.errors import ConfigError, OutOfMemory

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20}
_UNITS |= {"g": 1 << 30, "gb": 1 << 30, "t": 1 << 40, "tb": 1 << 40}
#: a measurement is good for so long; it takes a few system calls.
_FRESH_SECONDS = 0.005
#: giving memory back takes its time, too.
_TRIM_SECONDS = 1.0
#: proc_pid_rusage: the first version of its answer, and where the footprint is in it.
_RUSAGE_V0, _FOOTPRINT_OFFSET, _RUSAGE_BYTES = 0, 72, 96
_RSS_ANON = re.compile(rb"^RssAnon:\s+(\d+) kB", re.MULTILINE)

REFUSAL = "command not allowed when used memory > 'maxmemory'."


def size(text: str) -> int:
    """Bytes from ``123``, ``64mb``, ``2g``. Raises ValueError."""
    digits = text.rstrip("bBkKmMgGtT")
    unit = text[len(digits) :].lower()
    if not digits.isascii() or not digits.isdigit() or unit not in _UNITS:
        raise ValueError(f"'{text}' is not a size such as 512mb or 20g")
    return int(digits) * _UNITS[unit]


def limit(text: str) -> int:
    """Bytes from a size, or from ``N%`` of this machine's memory. Raises ValueError."""
    if not text.endswith("%"):
        return size(text)
    share = text[:-1]
    if not (share.isascii() and share.isdigit() and 1 <= int(share) <= 100):
        raise ValueError(f"'{text}' is not 1% to 100%")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * int(share) // 100


def anonymous_bytes() -> int:
    """What of this process's memory counts; 0 where the system does not tell."""
    if sys.platform == "darwin":
        return _footprint()
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            found = _RSS_ANON.search(file.read(8192))
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _footprint() -> int:
    answer = ctypes.create_string_buffer(4 * _RUSAGE_BYTES)
    failed = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_V0, answer)
    return 0 if failed else int(struct.unpack_from("<Q", answer, _FOOTPRINT_OFFSET)[0])


def _trim() -> None:
    """Let the C library give back what it keeps; elsewhere than with glibc it does so itself."""
    if sys.platform.startswith("linux"):
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            return


def refuse_below_own_use(maxmemory: int) -> None:
    """Raise ConfigError for a limit that a server without any data is past already.

    Called before anything is recovered.
    """
    if not maxmemory:
        return
    _trim()
    used = anonymous_bytes()
    if used >= maxmemory:
        raise ConfigError(
            f"--maxmemory: {maxmemory:,} bytes are less than the {used:,} that the server itself "
            "needs, so every write would be refused"
        )


def past_at_start(maxmemory: int) -> str:
    """What to say of a server whose recovered data is past the limit; empty when it is not."""
    if not MemoryLimit(maxmemory).exceeded():
        return ""
    return (
        f"--maxmemory: {anonymous_bytes():,} bytes are used already, {maxmemory:,} are allowed: "
        "every write is refused until something is deleted, or CONFIG SET maxmemory allows more"
    )


class Cache(Protocol):
    """Memory that can be given up."""

    def sparable(self) -> int:
        """Bytes that it could free."""

    def spare(self, nbytes: int) -> None:
        """Free so many."""


class MemoryLimit:
    """``maxmemory`` in bytes, 0 for none, and the ``cache`` to take from; both may be changed."""

    policy = "noeviction"

    def __init__(self, maxmemory: int = 0) -> None:
        self.maxmemory = maxmemory
        self.cache: Cache | None = None
        self._used = 0
        self._measured = self._trimmed = float("-inf")

    def exceeded(self) -> bool:
        """Whether commands that need more memory are to be refused."""
        return self._excess() > self._sparable()

    def is_past(self) -> bool:
        """Whether more is used than allowed, whatever the cache could give up."""
        return self._excess() > 0

    def check(self) -> None:
        """Raise OutOfMemory when the limit is exceeded and the cache cannot help."""
        excess = self._excess()
        if excess <= 0:
            return
        if self.cache is not None and excess <= self._sparable():
            self.cache.spare(excess)
            self._measured = self._trimmed = float("-inf")
            excess = self._excess()
        if excess > 0:
            raise OutOfMemory(REFUSAL)

    def _sparable(self) -> int:
        return 0 if self.cache is None else self.cache.sparable()

    def _excess(self) -> int:
        """Bytes past the limit; not positive when there are none."""
        if not self.maxmemory:
            return 0
        now = time.monotonic()
        if now - self._measured > _FRESH_SECONDS:
            self._used, self._measured = anonymous_bytes(), now
            if self._used > self.maxmemory and now - self._trimmed > _TRIM_SECONDS:
                _trim()
                self._used, self._trimmed = anonymous_bytes(), now
        return self._used - self.maxmemory
