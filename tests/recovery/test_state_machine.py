"""A server and a small model side by side, over every write command, killed in between.

Hypothesis draws the commands. Each reply is held against the model's, and after every
restart all that a client can read. The server is a real process, stopped or killed for good.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pion_vllm_mlx.server.command import TABLE
from tests.conftest import free_port_block
from tests.recovery.state_machine_commands import (
    Words,
    World,
    key_ops,
    mixed,
    prefix_ops,
)
from tests.recovery.state_machine_invalid import INVALID, invalid_commands
from tests.recovery.state_machine_keys import Moment
from tests.recovery.state_machine_model import group_of
from tests.recovery.state_machine_observe import observe
from tests.recovery.state_machine_server import ForkedServer, Nursery, drain
from tests.recovery.state_machine_steps import Steps, now, outcome
from tests.server.wire import Refusal, Wire, request

#: writes that are not commands of ``Op``: the rules named here send them
OTHER_WRITES = {"EXEC", "V.RESTORE"}
MEMORY_WRITES = {"STATE.ALLOC", "STATE.WRITE", "KV.STORE", "ATTEND.CREATE", "ATTEND.STORE"}
MEMORY_WRITES |= {"ATTEND.PREFIX.STORE"}
COPIES = {"KV.PREFIX.WARM"}
"""What fills the attention cache from stored rows stores nothing; tests/server/attention has it."""

_INVALID = invalid_commands()
_ENDS = ["go on", "refusals", "restart", "kill", "kill under way"]
_SEEDS = st.integers(0, 1 << 24)


class ServerAndModel(Steps, RuleBasedStateMachine):
    """One rule: some steps, and what comes after them."""

    nursery: ClassVar[Nursery]
    port: ClassVar[int]
    home: ClassVar[Path]
    restarts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.home, prefix="machine-"))
        flags = ("--max-sessions", "16", "--appendfsync", "no", "--wal-size", "1")
        data = self.folder / "data"
        data.mkdir(mode=0o700)
        self.server = ForkedServer(self.nursery, self.port, data, flags)
        self.world = World()
        self.wire: Wire | None = None
        self.agreed = True

    @initialize()
    def begin(self) -> None:
        self.wire = self.server.start()

    @rule(seed=_SEEDS, count=st.integers(0, 80), end=st.sampled_from(_ENDS))
    def work(self, seed: int, count: int, end: str) -> None:
        """Commands of all kinds, then the end; fewer of them are the beginning of more."""
        rng, self.agreed = Random(seed), False
        for _ in range(count):
            rng.choice(self.steps)(self, rng)
        match end:
            case "refusals":
                for _ in range(5):
                    self._refused(rng.choice(_INVALID), inside=rng.random() < 0.3)
                self.holds()
            case "restart":
                self.restart()
            case "kill":
                self.kill()
            case "kill under way":
                self.kill_under_way(rng)
        self.agreed = True

    def _refused(self, words: Words, inside: bool) -> None:
        if inside and TABLE[words[0]].keyspace and words[0] != b"EXEC":
            answers = self.client.together((b"MULTI",), words, (b"EXEC",))
            assert isinstance(answers[1], Refusal) or isinstance(answers[2][0], Refusal), answers
            assert "internal" not in str(answers), answers
        else:
            answer, pong = self.client.together(words, (b"PING",))
            assert isinstance(answer, Refusal) and "internal" not in answer, (words, answer)
            assert pong == "PONG"

    # -- restarts ----------------------------------------------------------------

    def restart(self) -> None:
        self.client.close()
        assert self.server.stop() == 0, self.server.output()
        self._again("stopped")

    def kill(self) -> None:
        self.server.kill()
        self.client.close()
        self._again("killed")

    def kill_under_way(self, rng: Random) -> None:
        """Killed while it works: what it answered is there, of the rest a beginning."""
        ops = [mixed(prefix_ops, key_ops)(rng) for _ in range(rng.randint(2, 20))]
        read = rng.randint(0, len(ops))
        worlds, sent = [self.world], []
        before = now()
        for op in ops:
            world = worlds[-1].copy()
            words, effect = op.prepare(world, before)
            outcome(effect, world, Moment(before.earliest, before.latest + 60_000))
            worlds.append(world)
            sent.append(words)
        self.client.send(b"".join(request(*words) for words in sent))
        replies = [self.client.reply() for _ in range(min(read, len(sent)))]
        self.server.kill()
        replies += drain(self.client)
        self.client.close()
        self.restarts["under way"] += len(replies) < len(sent)
        candidates = _possible(worlds, sent, len(replies))
        self._again("killed under way", candidates)

    def _again(self, how: str, candidates: list[World] | None = None) -> None:
        self.restarts[how] += 1
        self.wire = self.server.start()
        if candidates is not None:
            found = observe(self.client)
            for world in candidates:
                world.restarted()
            fitting = [world for world in candidates if not found.difference(world)]
            assert fitting, [found.difference(world) for world in candidates]
            self.world = fitting[0]
        self.world.restarted()
        self.holds()

    def holds(self) -> None:
        """All that can be read is what the model holds."""
        difference = observe(self.client).difference(self.world)
        assert not difference, difference

    @invariant()
    def is_alive(self) -> None:
        if self.wire is not None:
            assert self.client.ask("PING") == "PONG"

    def teardown(self) -> None:
        try:
            if self.wire is not None and self.agreed:
                self.holds()
                self.kill()
                self.client.close()
                assert self.server.stop() == 0
                output = self.server.output()
                assert "Traceback" not in output and "internal error" not in output, output
        finally:
            self.server.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


def _possible(worlds: list[World], sent: list[Words], answered: int) -> list[World]:
    """The states after as many commands as were answered, or more, or half of a drop."""
    found = worlds[answered:]
    for world, words in zip(worlds[answered:], sent[answered:], strict=False):
        if words[0] in (b"KV.PREFIX.DROP", b"V.DROP", b"V.FREE"):
            # states have a log of their own, which is written first
            half = world.copy()
            for name in words[1:]:
                if words[0] == b"KV.PREFIX.DROP":
                    half.prefixes.drop_namespace_states(name)
                elif name in half.prefixes.sides and group_of(name) != name:
                    half.prefixes.drop_namespace_states(group_of(name))
                found.append(half.copy())
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[ServerAndModel]]:
    memory = Path("/dev/shm")
    home = tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path, prefix="pion-test-")
    ServerAndModel.home, ServerAndModel.port = Path(home), free_port_block()
    ServerAndModel.nursery = Nursery()
    ServerAndModel.done, ServerAndModel.restarts = Counter(), Counter()
    try:
        yield ServerAndModel
    finally:
        ServerAndModel.nursery.close()
        shutil.rmtree(home, ignore_errors=True)


def _profile(examples: int, steps: int, fixed: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=fixed,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def test_every_write_command_of_the_table_has_a_rule() -> None:
    from tests.recovery.state_machine_commands import KEY_WRITES, PREFIX_OPS

    prefix = {
        "register": "KV.PREFIX.REGISTER",
        "create": "V.CREATE",
        "store": "V.STOREBATCH",
        "ssm_store": "SSM.PREFIX.STORE",
        "ssm_drop": "SSM.PREFIX.DROP",
        "drop": "KV.PREFIX.DROP",
        "expire": "KV.PREFIX.EXPIRE",
        "pin": "KV.PREFIX.PIN",
    }
    assert set(prefix) | {"v_drop"} == set(PREFIX_OPS)
    ruled = set(prefix.values()) | set(KEY_WRITES) | OTHER_WRITES | MEMORY_WRITES
    ruled |= {"KV.PREFIX.UNPIN", "V.DROP", "V.FREE"}
    writes = {one.name for one in TABLE.values() if one.write or one.grows} - COPIES
    assert writes == ruled
    assert set(INVALID) <= writes


@pytest.mark.timeout(2400)
def test_server_and_model_agree_through_restarts_and_kills(
    machine: type[ServerAndModel], long_run: bool
) -> None:
    profile = _profile(200, 30, fixed=False) if long_run else _profile(11, 20, fixed=True)
    run_state_machine_as_test(machine, settings=profile)
    writes = {one.name for one in TABLE.values() if one.write or one.grows} - COPIES
    assert not writes - set(machine.done), "never accepted in this run"
    assert set(machine.restarts) >= {"stopped", "killed", "killed under way"}
    print(f"\n{sum(machine.done.values())} commands, {dict(machine.restarts)}")
