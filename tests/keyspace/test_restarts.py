"""Whatever is done to keys, through saves and crashes: a real Redis that never stops agrees."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.wire.resp import encode
from tests.keyspace.test_against_redis import COMMAND, comparable
from tests.recovery.driving import Driver
from tests.server.wire import Wire

SAVE, CRASH = ["SAVE"], ["CRASH"]
#: a transaction of a connection ends with its server, so there is none here
LASTING = COMMAND.filter(lambda words: words[0] not in ("MULTI", "EXEC", "DISCARD", "WATCH"))
SCRIPT = st.lists(st.one_of(LASTING, LASTING, LASTING, st.just(SAVE), st.just(CRASH)), max_size=40)


class Ours:
    """The server's own path of a command, on a folder, without its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # the keys are in a folder of their own: the store's files are of no interest
        self.keys = folder / "keys"
        self.keys.mkdir()
        self.driver = Driver(folder)
        self.ends = socket.socketpair()
        self.wire = Wire(self.ends[1])
        self.open()

    def open(self) -> None:
        async def opened() -> Keyspace:
            return Keyspace.open(StoreConfig(self.keys, appendfsync="no"))

        self.driver.server.keyspace = self.driver.loop.run_until_complete(opened())

    def crash(self) -> None:
        self.driver.server.keyspace._thread.shutdown()
        self.open()

    def ask(self, *words: str) -> object:
        try:
            answer = self.driver.ask(*words)
        except CommandError as error:
            answer = error
        self.ends[0].sendall(encode(answer, 2))
        return self.wire.reply()

    def close(self) -> None:
        self.driver.server.keyspace._thread.shutdown()
        self.driver.crash()
        self.wire.close()
        self.ends[0].close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=SCRIPT)
def test_a_crash_or_a_save_between_any_two_commands_changes_no_answer(
    script: list[list[str]], redis_port: int
) -> None:
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(dir=place, prefix="pion-test-"))
    ours = Ours(folder)
    try:
        with Wire.tcp(redis_port) as real:
            real.ok("FLUSHALL")
            for words in [*script, CRASH, *(["TYPE", name] for name in "abc")]:
                if words == CRASH:
                    ours.crash()
                elif words == SAVE:
                    ours.ask("SAVE")
                else:
                    mine, theirs = ours.ask(*words), real.ask(*words)
                    assert comparable(words, mine) == comparable(words, theirs), words
    finally:
        ours.close()
        shutil.rmtree(folder)
