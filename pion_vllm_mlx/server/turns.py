"""Looking at many keys on the event loop, where others have their turns meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

#: how long one look lasts before others have a turn.
TURN_SECONDS = 0.002


def at_once(parts: Iterable[Iterable[bytes]], look: Callable[[bytes], None]) -> None:
    """Look at every name of every part, at one moment."""
    for part in parts:
        for name in part:
            look(name)


async def in_turns(parts: Iterable[Iterable[bytes]], look: Callable[[bytes], None]) -> None:
    """Look at every name of every part. Between two turns whatever is looked at may change."""
    ends_at = time.monotonic() + TURN_SECONDS
    for part in parts:
        for name in part:
            look(name)
            if time.monotonic() > ends_at:
                await asyncio.sleep(0)
                ends_at = time.monotonic() + TURN_SECONDS
