"""One writer a tree, over all processes.

Every write to the segments of a tree holds the key ``lock:<root field>`` of its index: two
processes that store the same prompt, or two that leave it at once, come one after the other.
The lock is a courtesy, not a proof: one who sleeps past its end finds it gone when he
publishes, and rows that two wrote over each other do not have the checksums of a record.
The lock of a writer of this machine that was killed is taken over at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import root_field
from pion_vllm_mlx.cache.lineage.client import Commands, LineageClient, as_text
from pion_vllm_mlx.cache.lineage.index import Names
from pion_vllm_mlx.cache.lineage.presence import has_died
from pion_vllm_mlx.errors import PionError

LOCK_SECONDS = 6.0
"""A writer that died on another machine holds others up for so long; one at work renews its lock
in time."""

PATIENCE_SECONDS = 15.0
_STEP_SECONDS = 0.05
_SETTLE_SECONDS = 0.25
"""What a writer sent before it was killed is carried out by then, or never."""


class Contended(PionError):
    """Another process writes to the same tree for too long."""


@dataclass
class TreeLock:
    """A lock that was taken; ``token`` says by whom, ``renewed`` when that was last said.

    ``last``: what is published next is the last of its writer, and gives the lock back.
    """

    key: str
    token: str
    renewed: float
    last: bool = False
    released: bool = False

    def closing(self) -> list[tuple[str, str]]:
        """The commands that give the lock back with the last thing that is published."""
        return [("DEL", self.key)] if self.last else []

    def held(self, value: Any) -> bool:
        """Whether the value of the key says that it is still ours."""
        return bool(value == self.token.encode())


def acquire(client: LineageClient, names: Names, root: str, patience: float) -> TreeLock:
    """Takes the lock of the tree with this root. Raises Contended, StoreUnavailable."""
    token = f"{client.presence.name()}-{secrets.token_hex(8)}"
    lock = TreeLock(names.key(f"lock:{root}"), token, time.monotonic())
    take = ("SET", lock.key, lock.token, "PX", round(1000 * LOCK_SECONDS))
    ends_at = time.monotonic() + patience
    while True:
        taken, holder = client.demand(names.route, [(*take, "NX"), ("GET", lock.key)])
        if taken is not None or _taken_over(client, names, as_text(holder), take):
            lock.renewed = time.monotonic()
            return lock
        if time.monotonic() >= ends_at:
            raise Contended("another process is storing to the same lineage")
        time.sleep(_STEP_SECONDS)


def _taken_over(client: LineageClient, names: Names, holder: str, take: Sequence[Any]) -> bool:
    """Takes the lock of a holder that was killed, and has not been taken over by another."""
    if not has_died(holder.partition("-")[0]):
        return False
    time.sleep(_SETTLE_SECONDS)

    def decide(values: Sequence[Any]) -> Commands | None:
        return [take] if as_text(values[0]) == holder else None

    key = take[1]
    return client.transaction(names.route, [key], [("GET", key)], decide) is not None


def renew(client: LineageClient, names: Names, lock: TreeLock) -> None:
    """Says once more that the writer is at work, unless it just has."""
    if time.monotonic() - lock.renewed < LOCK_SECONDS / 4:
        return
    lock.renewed = time.monotonic()
    client.pipeline(names.route, [("PEXPIRE", lock.key, round(1000 * LOCK_SECONDS))])


def release(client: LineageClient, names: Names, lock: TreeLock) -> None:
    """Gives the lock back, if it is still ours."""
    if lock.released:
        return

    def decide(values: Sequence[Any]) -> Commands | None:
        return [("DEL", lock.key)] if lock.held(values[0]) else None

    client.transaction(names.route, [lock.key], [("GET", lock.key)], decide)


@contextmanager
def held(client: LineageClient, names: Names, tokens: TokenIds) -> Iterator[TreeLock]:
    """The lock of the tree that begins like a prompt. Raises Contended, StoreUnavailable."""
    lock = acquire(client, names, root_field(tokens) or "", PATIENCE_SECONDS)
    try:
        yield lock
    finally:
        release(client, names, lock)
