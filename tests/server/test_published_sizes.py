"""Sizes that published clients use: long states, commands of a thousand pairs, replies too long."""

from __future__ import annotations

import pytest

from tests.conftest import RunningServer
from tests.server.wire import Refusal, Wire

MIB = 1 << 20
STATE_BYTES = (MIB // 2, 2 * MIB, 4 * MIB, 4 * MIB + 1, 8 * MIB, 12 * MIB, 16 * MIB)
PAIRS = 1000


def states() -> dict[int, bytes]:
    """By layer: every size, of zeros and of ones."""
    blobs = [bytes([fill]) * size for size in STATE_BYTES for fill in (0, 0xFF)]
    return dict(enumerate(blobs))


def test_states_of_every_size_survive_log_and_snapshot(pion_server: RunningServer) -> None:
    with Wire.tcp(pion_server.port) as wire:
        for layer, blob in states().items():
            wire.ok("SSM.PREFIX.STORE", "long", layer, blob)
        wire.ok("SSM.PREFIX.STORE", "long", 0, b"short")  # over a longer one
    for saved in (False, True):
        pion_server.restart()
        with Wire.tcp(pion_server.port) as wire:
            assert wire.ask("SSM.PREFIX.FETCH", "long", 0) == b"short"
            for layer, blob in list(states().items())[1:]:
                assert wire.ask("SSM.PREFIX.FETCH", "long", layer) == blob, (saved, len(blob))
            if not saved:
                wire.ok("KV.PREFIX.SAVE")


def test_a_thousand_pairs_go_in_and_out_in_one_command(shared: RunningServer, ns: str) -> None:
    fields = {f"f{number}": b"%d" % number for number in range(PAIRS)}
    flat = [word for pair in fields.items() for word in pair]
    scored = [word for number in range(PAIRS) for word in (number, f"m{number}")]
    with Wire.tcp(shared.port) as wire:
        assert wire.ask("HSET", ns, *flat) == PAIRS
        assert wire.ask("HMGET", ns, *fields) == list(fields.values())
        assert wire.ask("ZADD", f"{ns}z", *scored) == PAIRS
        assert wire.ask("ZADD", f"{ns}z", "NX", *scored) == 0
        found = wire.ask("ZRANGE", f"{ns}z", 0, 511, "WITHSCORES")
        assert found == [word for n in range(512) for word in (b"m%d" % n, b"%d" % n)]
        assert wire.ask("DEL", ns, f"{ns}z") == 2


@pytest.mark.parametrize("form", ["range", "batch"])
def test_a_reply_past_1_gib_is_refused_before_any_of_it(
    shared: RunningServer, ns: str, form: str
) -> None:
    rows = MIB // 16  # of 16 KiB each in float32: 1 GiB
    with Wire.tcp(shared.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", ns, 4096, "fp16")
        wire.ok("V.STOREBATCH", f"{ns}_pk", 0, 0, 1, bytes(8192), "FMT", "F16")
        where = (0, "RANGE") if form == "range" else ("BATCH",)
        answer, pong = wire.together(("V.FETCH", f"{ns}_pk", *where, 0, rows + 1), ("PING",))
        assert isinstance(answer, Refusal) and answer.startswith("ERR "), answer
        assert pong == "PONG"
