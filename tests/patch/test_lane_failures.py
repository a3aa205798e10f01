"""A binary lane that fails in the middle of a forward: it goes on over RESP, with right numbers."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import pytest

import pion_vllm_mlx
from pion_vllm_mlx.cache import attend_lane
from tests.conftest import RunningServer, free_port_block
from tests.models import tiny_model, token_ids
from tests.patch.conftest import Opener, alone, furthest

IDS = token_ids(40)
STEPS = 6

pytestmark = pytest.mark.usefixtures("patched")


@dataclass
class Between:
    """Stands between a client and both ports of a server, on two ports of its own.

    ``left``: bytes that the binary lane still answers before it fails; None: it does not fail.
    ``fails``: what then becomes of it.
    """

    server_port: int
    port: int = field(default_factory=free_port_block)
    left: int | None = None
    fails: str = "silent"
    lanes: int = 0

    def __enter__(self) -> Between:
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        for offset in (0, 1):
            door = socket.create_server(("127.0.0.1", self.port + offset))
            self._open.append(door)
            threading.Thread(target=self._accept, args=(door, offset), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self, door: socket.socket, offset: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = door.accept()
                far = socket.create_connection(("127.0.0.1", self.server_port + offset))
                self._open += [near, far]
                self.lanes += offset
                back = partial(self._answer if offset else self._tell, near)
                for pump in ((near, far, far.sendall), (far, near, back)):
                    threading.Thread(target=_pump, args=pump, daemon=True).start()

    def _tell(self, near: socket.socket, data: bytes) -> None:
        """RESP as it is, but for the port of the lane."""
        told = b"binary_port:%d" % (self.port + 1)
        near.sendall(re.sub(rb"binary_port:\d+", told, data))

    def _answer(self, near: socket.socket, data: bytes) -> None:
        with self._lock:
            most = len(data) if self.left is None else min(self.left, len(data))
            if self.left is not None:
                self.left -= most
            failed = self.left == 0
        near.sendall(data[:most])
        if failed and self.fails == "cut":
            near.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket, send: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            send(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def between(store: RunningServer) -> Iterator[Between]:
    with Between(store.port) as proxy:
        yield proxy


@pytest.mark.parametrize("fails", ["silent", "cut"])
@pytest.mark.parametrize("left", [0, 3, 7, 300, 5000])
def test_a_forward_goes_on_over_resp_when_its_lane_fails(
    between: Between, monkeypatch: pytest.MonkeyPatch, fails: str, left: int
) -> None:
    monkeypatch.setattr(attend_lane, "_GREETING_SECONDS", 0.3)
    model, opener = tiny_model("llama"), Opener(between.port, monkeypatch)
    try:
        pc = opener(model)
        name = f"fails {fails} {left}"
        pc.get_or_prefill(IDS, name)
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, name, pc, len(IDS))
        wanted = alone(model, IDS, STEPS)
        pc.attention.silence_seconds = 0.2
        assert cache[0].lane == "binary"
        between.fails, between.left = fails, left
        found = [model(mx.array([token_ids(12, seed=5)]), cache=cache)]
        found += [model(mx.array([[token]]), cache=cache) for token in token_ids(STEPS, seed=9)]
        assert furthest(found, wanted) < 1e-5
        assert pc.attention.lane == "resp" and pc.attention.queries["resp"]
        between.left = None
        assert pc.attention.lane == "resp"  # for a while
    finally:
        opener.close()


@pytest.mark.parametrize("fails", ["silent", "cut"])
def test_a_lane_is_used_again_when_it_answers_again(
    between: Between, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(attend_lane, "_GREETING_SECONDS", 0.3)
    monkeypatch.setattr(attend_lane._Pause, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(attend_lane._Pause, "LONGEST_SECONDS", 0.2)
    model, opener = tiny_model("llama"), Opener(between.port, monkeypatch)
    try:
        pc = opener(model)
        pc.get_or_prefill(IDS, f"again {fails}")
        pc.attention.silence_seconds = 0.2
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, f"again {fails}", pc, len(IDS))
        wanted = alone(model, IDS, STEPS)
        found = [model(mx.array([token_ids(12, seed=5)]), cache=cache)]
        between.fails, between.left = fails, 7
        tokens = token_ids(STEPS, seed=9)
        found += [model(mx.array([[token]]), cache=cache) for token in tokens[:2]]
        assert pc.attention.queries["resp"]
        between.left = None
        given_up = time.monotonic() + 30
        while pc.attention.lane != "binary":
            assert time.monotonic() < given_up
            time.sleep(0.05)
        before = dict(pc.attention.queries)
        found += [model(mx.array([[token]]), cache=cache) for token in tokens[2:]]
        assert furthest(found, wanted) < 1e-5
        assert pc.attention.queries["binary"] > before["binary"]
        assert pc.attention.queries["resp"] == before["resp"]
    finally:
        opener.close()


@pytest.mark.parametrize("fails", ["silent", "cut"])
def test_a_lane_that_does_not_greet_is_not_used(
    between: Between, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(attend_lane, "_GREETING_SECONDS", 0.3)
    between.fails, between.left = fails, 0
    model, opener = tiny_model("llama"), Opener(between.port, monkeypatch)
    try:
        pc = opener(model)
        pc.get_or_prefill(IDS, f"greets {fails}")
        cache = pion_vllm_mlx.make_pion_prompt_cache(model, f"greets {fails}", pc, len(IDS))
        assert cache[0].lane == "resp"
        found = [model(mx.array([token_ids(12, seed=5)]), cache=cache)]
        assert furthest(found, alone(model, IDS, 0)) < 1e-5
    finally:
        opener.close()
