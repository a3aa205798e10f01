"""Mutated requests on both lanes: one reply a request, nobody else notices, nothing piles up.

With ``--long`` two million requests a seed and lane, else a fixed small number.
"""

from __future__ import annotations

from random import Random

import pytest

from pion_vllm_mlx.server.binary_commands import OPERATIONS
from pion_vllm_mlx.server.command import TABLE
from tests.hostile import fuzz_frames, fuzz_resp
from tests.hostile.conftest import StartServer
from tests.hostile.fuzz_bytes import Expected
from tests.hostile.fuzz_run import FRAMES, RESP, Fuzzer, Lane, problems
from tests.hostile.watching import needs_proc

#: memory that allocators may keep beside what is stored, which is the same at both looks
SLACK_BYTES = 48 << 20
LONG = 2_000_000


@needs_proc
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("lane", "requests"), [(RESP, 20_000), (FRAMES, 100_000)], ids=repr)
def test_mutated_requests_are_answered_one_by_one_and_leave_nothing_behind(
    start_server: StartServer, lane: Lane, requests: int, seed: int, long_run: bool
) -> None:
    server = start_server("--appendfsync", "no")
    report = Fuzzer(server, lane, seed).run(LONG if long_run else requests)
    print(report.line(lane.name))
    assert server.process is not None and server.process.poll() is None
    assert not problems(server.output())
    after_a_tenth, at_the_end = report.memory
    assert at_the_end < after_a_tenth + SLACK_BYTES, report.line(lane.name)
    assert report.files[1] <= report.files[0] + 8, report.line(lane.name)
    # the run was what it is meant to be
    assert report.mutated > report.batches // 3
    assert report.ended and report.cut


def test_every_command_and_opcode_is_drawn() -> None:
    rng = Random(0)
    names, codes = set(), set()
    for _ in range(20_000):
        words = fuzz_resp.first_words(fuzz_resp.request(rng))
        names |= {word.upper().decode("latin-1") for word in words}
        codes.add(fuzz_frames.request(rng)[2])
    assert {command.name for command in TABLE.values()} - fuzz_resp.LEFT_OUT <= names
    assert set(OPERATIONS) < codes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"*1\r\n$4\r\nPING\r\nPING\r\n\r\n*0\r\n", Expected(2)),
        (b"*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nPIN", Expected(1, whole=False)),
        (b"*1\r\n$04\r\nPING\r\n", Expected(0, ends=True, explains=True)),
        (b"*1\r\n$4\r\nQUIT\r\n*1\r\n$4\r\nPING\r\n", Expected(1, ends=True)),
        (b'ECHO "a\r\nPING\r\n', Expected(0, ends=True, explains=True)),
        (b"*1\r\n$536870913\r\n", Expected(0, ends=True, explains=True)),
        (b"*1\r\n$536870912\r\n", Expected(0, whole=False)),
    ],
)
def test_the_reference_reads_requests_by_the_rules(data: bytes, expected: Expected) -> None:
    assert fuzz_resp.expected(data) == expected
