"""Python's collector of garbage, kept from looking at what stays again and again.

With 65,536 sessions a full collection stops everybody for 0.3 s, and finds nothing: an index has
no cycles. So what lived through one that took long is set aside (``gc.freeze``). Of what does have
cycles, connections, those that were open just then are looked at again an hour later.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

#: a full collection that takes no longer is not worth avoiding.
LONG_SECONDS = 0.02
#: how long what was set aside is not looked at.
ASIDE_SECONDS = 3600.0
_FULL = 2


class SetsAside:
    """A callback of ``gc``: ``gc.callbacks.append(SetsAside())``, once a process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = self._began = clock()

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != _FULL:
            return
        now = self._clock()
        if phase == "stop":
            if now - self._began > LONG_SECONDS:
                gc.freeze()
            return
        self._began = now
        if now - self._looked >= ASIDE_SECONDS:
            self._looked = now
            gc.unfreeze()  # this collection looks at everything
