"""The binary lane for attention: opened when first needed, left alone for a while if it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pion_vllm_mlx.cache.connection import Address, RespConnection, info_fields
from pion_vllm_mlx.cache.frame_connection import PING, FrameConnection
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.cache.store_client_endpoint import BackOff
from pion_vllm_mlx.errors import (
    ColdMiss,
    CommandError,
    DeadlineExceeded,
    PionError,
    ServerRefused,
    StoreUnavailable,
    from_wire,
)
from pion_vllm_mlx.wire.frames import Status

log = logging.getLogger("pion_vllm_mlx")

_AUTH = 0x37
#: how long the server may take to find that it knows us, and to compute one attention.
_GREETING_SECONDS, _WORK_SECONDS = 2.0, 60.0
_LOOPBACK = "127.0.0.1"


class _Pause(BackOff):
    """A lane that is silent costs two seconds each time that it is tried."""

    FIRST_SECONDS = 5.0
    LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Silence:
    """What is asked after so many seconds without a byte; it raises to give up."""

    seconds: float
    ask: Callable[[], None]


class BinaryLane:
    """One connection to the port behind that of RESP. Thread-safe.

    Only where the server has one worker: slots belong to workers, and a lane leads to any.
    """

    def __init__(self, client: StoreClient, password: str | None) -> None:
        self._client = client
        self._password = password
        self._lock = threading.Lock()
        self._frames: FrameConnection | None = None
        self._place: tuple[str, int] | None = None
        self._pause = _Pause()

    def usable(self) -> bool:
        """Whether the lane is open, or can be opened now."""
        with self._lock:
            if self._frames is None and self._pause.left() <= 0:
                self._frames = self._opened()
                if self._frames is None:
                    self._pause.failed("no binary lane")
            return self._frames is not None

    def ask(
        self, opcode: int, body: bytes, num_bytes: int, silence: Silence | None = None
    ) -> bytes | None:
        """The body of the reply; None after a failure of the lane, which then has a pause.

        It has failed, too, where nothing comes although the server answers ``silence``, and a new
        connection to the lane gets no answer. Raises DeadlineExceeded for a server that is silent,
        or computes for too long: that one is not asked again, on another lane. Raises ColdMiss,
        and CommandError for a slot that is not there and for a refusal.
        """
        with self._lock:
            if self._frames is None:
                return None
            self._frames.timeout = max(_WORK_SECONDS, self._client.seconds(num_bytes))
            if silence is not None:
                self._frames.silence_seconds = silence.seconds
                self._frames.on_silence = partial(self._listen, silence)
            try:
                status, reply = self._frames.exchange(opcode, body)
                self._pause.succeeded()
            except DeadlineExceeded as error:
                self._give_up(error)
                raise
            except StoreUnavailable as error:
                self._give_up(error)
                return None
        if status == Status.OK:
            return reply
        if status == Status.MISS:
            raise CommandError("session not found")
        # the line that RESP has behind its dash
        refusal = from_wire(reply.decode("utf-8", "replace"))
        if status == Status.COLDMISS and not isinstance(refusal, ColdMiss):
            raise ColdMiss("the slot is not resident")
        raise refusal

    def close(self) -> None:
        with self._lock:
            if self._frames is not None:
                self._frames.close()
            self._frames = None

    # -- inside -------------------------------------------------------------------

    def _opened(self) -> FrameConnection | None:
        """A connection whose server answers PING, after AUTH where a password is known."""
        try:
            self._place = self._client.endpoint.door.through(self._find)
            if self._place is None or self._client.endpoint.workers() > 1:
                return None
            return self._greeted(self._place)
        except (PionError, OSError) as error:
            log.info("no binary lane: %s", error)
            return None

    def _greeted(self, place: tuple[str, int]) -> FrameConnection:
        """Raises PionError, OSError."""
        frames, finished = FrameConnection(*place, _GREETING_SECONDS), False
        try:
            if self._password:
                frames.call(_AUTH, self._password.encode())
            frames.call(PING)
            finished = True
        finally:
            if not finished:
                frames.close()
        return frames

    def _listen(self, silence: Silence) -> None:
        """Raises what ``silence`` raises; StoreUnavailable where the lane alone is silent."""
        silence.ask()
        assert self._place is not None
        try:
            self._greeted(self._place).close()
        except (PionError, OSError) as error:
            raise StoreUnavailable(f"it is silent, and the server is not: {error}") from error

    def _find(self, connection: RespConnection) -> tuple[str, int] | None:
        """Host and port of the lane, where the server has one that belongs to this address."""
        fields = info_fields(connection.command("INFO", "server"))
        text = fields.get("binary_port", "")
        port = int(text) if text.isdigit() else 0
        address: Address = connection.address
        if not port:
            return None
        if address.path is not None:
            return _LOOPBACK, port
        if address.tls is not None:
            return None  # the lane has no TLS
        # Behind a forwarded port the next one may lead to another server.
        return (address.host, port) if port == address.port + 1 else None

    def _give_up(self, error: PionError | ServerRefused) -> None:
        self._pause.failed(str(error))
        log.info("the binary lane is left alone for %.0f s: %s", self._pause.left(), error)
        if self._frames is not None:
            self._frames.close()
        self._frames = None


