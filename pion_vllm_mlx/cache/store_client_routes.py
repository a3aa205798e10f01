"""Which worker of a server has a namespace.

A namespace lives on one worker. OWNER says on which, once; it is remembered until the
worker fails, or refuses because the namespace lives elsewhere. One that nobody has yet goes
where every client would put it: to worker CRC-32C of its name, modulo their number. The
segments of a lineage, ``pps<mid>s<n>``, live together: for all of them it is ``pps<mid>``.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict

from crc32c import crc32c

from pion_vllm_mlx.cache.store_client_endpoint import Door, Endpoint
from pion_vllm_mlx.errors import CommandError, StoreUnavailable

_LIVES_ON = re.compile(r"lives on worker (\d{1,5})(?!\d)")
_SEGMENT = re.compile(r"(pps.+)s[0-9]+", re.DOTALL)
_MOST_NAMESPACES = 65_536


def named_worker(error: CommandError) -> int | None:
    """The worker to which a refusal sends, or None."""
    found = _LIVES_ON.search(error.sentence)
    return int(found[1]) if found else None


def kept_together(namespace: str) -> str:
    """What all namespaces that live where this one does have in common."""
    found = _SEGMENT.fullmatch(namespace)
    return found[1] if found else namespace


def usual_worker(namespace: str, workers: int) -> int:
    """Where a namespace goes that nobody has yet."""
    return int(crc32c(kept_together(namespace).encode("utf-8", "surrogateescape"))) % workers


class Routes:
    """The doors behind which namespaces are. Thread-safe as the endpoint is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        #: by what ``kept_together`` says
        self._homes: OrderedDict[str, int] = OrderedDict()

    def door(self, namespace: str) -> Door:
        """The way to a namespace. Raises StoreUnavailable, and OWNER's refusal."""
        workers = self._endpoint.workers()
        if workers < 2:
            return self._endpoint.door
        home = self._homes.get(kept_together(namespace))
        if home is None:
            home = self._ask(namespace)
            if home < 0:
                home = usual_worker(namespace, workers)
            self._remember(namespace, home)
        return self._endpoint.door_of(home)

    def redirect(self, namespace: str, error: CommandError) -> bool:
        """Whether a refusal says where the namespace is; then it is remembered."""
        worker = named_worker(error)
        if worker is None:
            return False
        if self._endpoint.workers() <= max(1, worker):
            self.forget()  # another server answers than the one that was asked
        self._remember(namespace, worker)
        return True

    def moved(self, namespace: str) -> bool:
        """Whether a namespace turns out to be elsewhere than thought. Raises StoreUnavailable."""
        before = self._homes.get(kept_together(namespace))
        if self._endpoint.workers() < 2:
            self._endpoint.ask_again()
            if self._endpoint.workers() < 2:
                return False
        owner = self._ask(namespace)
        if owner < 0 or owner == before:
            return False
        self._remember(namespace, owner)
        return True

    def forget(self) -> None:
        """A worker failed: what is known about all of them may be over."""
        self._homes.clear()
        self._endpoint.forget()

    def _ask(self, namespace: str) -> int:
        owner = self._endpoint.door.through(lambda c: c.command("KV.PREFIX.OWNER", namespace))
        try:
            return int(owner)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise StoreUnavailable("the server does not answer KV.PREFIX.OWNER") from None

    def _remember(self, namespace: str, worker: int) -> None:
        name = kept_together(namespace)
        # between any two steps another thread may forget all
        self._homes.pop(name, None)
        self._homes[name] = worker
        if len(self._homes) > _MOST_NAMESPACES:
            with contextlib.suppress(KeyError):
                self._homes.popitem(last=False)
