"""Many commands in one write: one reply for each, in order, whatever they wait for."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from tests.conftest import RunningServer
from tests.server.wire import Refusal, Wire, Word, request, settle

WIDTH = 256


def test_a_store_may_follow_its_registration_in_one_write(wire: Wire, ns: str) -> None:
    rows = np.random.default_rng(0).standard_normal((20_000, WIDTH)).astype("<f2").tobytes()
    short = rows[: 400 * WIDTH * 2]
    commands: list[tuple[Word, ...]] = [
        ("KV.PREFIX.REGISTER", ns, WIDTH, "fp16"),
        ("V.STOREBATCH", ns + "_pk", 0, 0, 20_000, rows, "FMT", "F16"),
        ("KV.PREFIX.REGISTER", ns + "x", WIDTH, "fp16", "HEADS", 4),
        ("V.STOREBATCH", ns + "x_pk", 0, 0, 400, short, "FMT", "F16"),
        ("V.STOREBATCH", ns + "x_pv", 1, 0, 20_000, rows, "FMT", "F16"),
        ("SSM.PREFIX.STORE", ns, 0, rows),
        ("KV.PREFIX.LOOKUP", ns),
        ("V.FETCH", ns + "_pk", 0, "RANGE", 0, 20_000, "FMT", "NATIVE"),
        ("V.FETCH", ns + "x_pk", 0, "RANGE", 0, 400, "FMT", "NATIVE"),
        ("V.FETCH", ns + "x_pv", 1, "RANGE", 0, 20_000, "FMT", "NATIVE"),
        ("SSM.PREFIX.FETCH", ns, 0),
        ("KV.PREFIX.DROP", ns, ns + "x"),
        ("V.STOREBATCH", ns + "_pk", 0, 0, 20_000, rows, "FMT", "F16"),
        ("PING",),
    ]
    sender = threading.Thread(target=wire.send, args=(b"".join(request(*c) for c in commands),))
    sender.start()
    replies = [wire.reply() for _ in commands]
    sender.join()
    assert replies[:7] == ["OK", "OK", "OK", "OK", "OK", "OK", "HIT"]
    assert replies[7] == rows and replies[8] == short and replies[9] == rows and replies[10] == rows
    assert replies[11] == 2
    assert isinstance(replies[12], Refusal) and "session not found" in replies[12]
    assert replies[13] == "PONG"
    settle(wire)


def test_a_schema_that_changes_on_the_way_decides_over_the_rows_behind_it(
    wire: Wire, ns: str
) -> None:
    rows = np.random.default_rng(1).standard_normal((9_000, WIDTH)).astype("<f4")
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp32")
    replies = wire.together(
        ("KV.PREFIX.REGISTER", ns, WIDTH, "fp16"),
        ("V.STOREBATCH", ns + "_pk", 0, 0, 9_000, rows.tobytes()),
        ("V.FETCH", ns + "_pk", 0, "RANGE", 0, 9_000, "FMT", "NATIVE"),
    )
    assert replies == ["OK", "OK", rows.astype("<f2").tobytes()]


def test_options_never_eat_the_command_behind(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    replies = wire.together(
        ("KV.PREFIX.SAVE",),
        ("PING",),
        ("KV.PREFIX.COMMIT",),
        ("PING",),
        ("KV.PREFIX.LOOKUP", ns, "TOKENS"),
        ("PING",),
        ("V.FETCH", ns + "_pk", 0, "RANGE", 0, 1, "FMT"),
        ("PING",),
    )
    assert replies[::2][:2] == ["OK", "OK"]
    assert [isinstance(reply, Refusal) for reply in replies[4::2]] == [True, True]
    assert replies[1::2] == ["PONG"] * 4


@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_mixed_commands_cut_anywhere_answer_in_order(
    wire: Wire, ns: str, seed: int
) -> None:
    chosen = random.Random(seed)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp32")
    commands: list[tuple[Word, ...]] = []
    expected: list[object] = []
    stored: dict[int, bytes] = {}
    for number in range(1_000):
        token = chosen.randrange(40)
        row = number.to_bytes(16, "little")
        kind = chosen.randrange(6)
        if kind == 0:
            commands.append(("V.STOREBATCH", ns + "_pk", 0, token, 1, row))
            expected.append("OK")
            stored[token] = row
        elif kind == 1:
            commands.append(("V.FETCH", ns + "_pk", 0, token))
            expected.append(stored.get(token))
        elif kind == 2:
            commands.append(("ECHO", number))
            expected.append(b"%d" % number)
        elif kind == 3:
            commands.append(("ECHO", bytes([number % 256]) * 100_000))
            expected.append(bytes([number % 256]) * 100_000)
        elif kind == 4:
            commands.append(("SSM.PREFIX.STORE", ns, token, b"%d" % number * 20_000))
            expected.append("OK")
        else:
            commands.append(("V.FETCH", ns + "_pk", number, "RANGE", 1, 1))
            expected.append("ERR V.FETCH: end must exceed start")
    data = b"".join(request(*command) for command in commands)

    def send() -> None:
        at = 0
        while at < len(data):
            step = chosen.choice([1, 17, 4_096, 1 << 20])
            wire.send(data[at : at + step])
            at += step

    sender = threading.Thread(target=send)
    sender.start()
    replies = [wire.reply() for _ in commands]
    sender.join()
    for command, got, wanted in zip(commands, replies, expected, strict=True):
        assert got == wanted, command[:4]
    settle(wire)


def test_nothing_behind_quit_is_executed(shared: RunningServer, wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    with Wire.tcp(shared.port) as other:
        other.send(request("PING") + request("QUIT") + request("KV.PREFIX.DROP", ns))
        assert [other.reply(), other.reply()] == ["PONG", "OK"]
        assert other.closed()
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"


def test_inline_commands_are_commands(wire: Wire) -> None:
    wire.send(b"PING\r\n\r\nECHO 'two words'\r\n" + request("PING"))
    assert [wire.reply(), wire.reply(), wire.reply()] == ["PONG", b"two words", "PONG"]


def test_connections_that_share_the_windows_all_get_their_turn(
    shared: RunningServer, wire: Wire, ns: str
) -> None:
    """More bytes wait to be stored than may be in flight: nobody starves, nothing mixes."""
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16")
    failures: list[object] = []

    def store(layer: int) -> None:
        rows = np.random.default_rng(layer).standard_normal((12_000, WIDTH)).astype("<f2").tobytes()
        with Wire.tcp(shared.port) as mine:
            sid = ns + "_pk"
            words = ("V.STOREBATCH", sid, layer, 0, 12_000, rows, "FMT", "F16")
            fetch = ("V.FETCH", sid, layer, "RANGE", 0, 12_000, "FMT", "NATIVE")
            mine.send(request(*words) * 2 + request("ECHO", rows[:500_000]) + request(*fetch))
            replies = [mine.reply() for _ in range(4)]
            if replies != ["OK", "OK", rows[:500_000], rows]:
                failures.append([str(reply)[:80] for reply in replies])

    threads = [threading.Thread(target=store, args=(layer,)) for layer in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    settle(wire)
