"""Telling the server of hits that it had no part in.

A prefix that this process serves by itself is in use all the same: the server counts the
hit, and does not evict the prefix as one that nobody asks for. The caller pays for putting
a note into a queue; a thread sends what came together, and whatever fails is let go.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.store_client_endpoint import Door
from pion_vllm_mlx.errors import PionError

#: notes that come within so long travel together.
GATHER_SECONDS = 0.05
#: a thread without notes for so long ends, and its connection closes.
IDLE_SECONDS = 5.0
#: how long closing waits for the last notes to leave.
CLOSE_SECONDS = 0.25
#: of more notes at a time, the oldest are let go.
MOST_NOTES = 4096

Connect = Callable[[Address], RespConnection]


class HitNotes:
    """The notes of one client. Thread-safe; a forked child begins with none."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._lock = threading.RLock()
        self._sender: _Sender | None = None

    def note(self, address: Address, namespace: str, tokens: int) -> None:
        """The server at ``address`` gets to know of one hit, some time, if a thread can start."""
        with self._lock:
            sender = self._sender
            if sender is None or sender.address != address or not sender.take(namespace, tokens):
                if sender is not None:
                    sender.stop()
                self._sender = sender = _started(self._connect(address))
                if sender is not None:
                    sender.take(namespace, tokens)

    def close(self) -> None:
        """Send what is left, if that is soon done."""
        with self._lock:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.stop()
            sender.join(CLOSE_SECONDS)


class _Sender(threading.Thread):
    """Sends notes to one address until it is stopped, or has nothing to do."""

    def __init__(self, connection: RespConnection) -> None:
        super().__init__(name="pion-hit-notes", daemon=True)
        self.address = connection.address
        self._connection = connection
        self._door = Door(lambda: connection)
        self._pid = os.getpid()
        self._notes: deque[tuple[str, int]] = deque(maxlen=MOST_NOTES)
        self._lock = threading.Lock()
        self._over = False
        self._waiting = threading.Event()
        self._stopping = threading.Event()

    def take(self, namespace: str, tokens: int) -> bool:
        """Queue one note; False from a thread that has ended, or was left behind by a fork."""
        if self._pid != os.getpid():
            return False
        with self._lock:
            if self._over:
                return False
            self._notes.append((namespace, tokens))
        if not self._waiting.is_set():
            self._waiting.set()
        return True

    def stop(self) -> None:
        """End after what is queued now. In a forked child nothing ends, and locks may be held."""
        if self._pid == os.getpid():
            self._stopping.set()
            self._waiting.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end, except in the thread itself and in a forked child."""
        if self._pid == os.getpid() and threading.current_thread() is not self:
            super().join(timeout)

    def run(self) -> None:
        while self._waiting.wait(IDLE_SECONDS) and not self._stopping.wait(GATHER_SECONDS):
            self._waiting.clear()
            self._send()
        with self._lock:
            self._over = True
        self._send()
        self._connection.close()

    def _send(self) -> None:
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        commands = [("KV.PREFIX.LOOKUP", name, "TOKENS", tokens) for name, tokens in notes]
        if commands:
            try:
                self._door.through(lambda connection: connection.pipeline(commands))
            except PionError:
                return  # best effort: the next hit is another note


def _started(connection: RespConnection) -> _Sender | None:
    """A thread that sends; None where the interpreter ends, or the system gives no thread."""
    sender = _Sender(connection)
    try:
        sender.start()
    except RuntimeError:
        connection.close()
        return None
    return sender
