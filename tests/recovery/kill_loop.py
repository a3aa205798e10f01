"""SIGKILL again and again under mixed load: the driver.

One data folder lives through all of it. In a *round* clients work on a server (or on the
workers of one) until it is killed, at a moment that the seed chooses; then it is started
again, every client compares all it knows with what the server has, and goes on. In some
lives of the server its limits are so small that it evicts all the time, in the others
nothing may be missing.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from tests.conftest import free_port_block
from tests.recovery.hasty import Starter
from tests.recovery.kill_loop_client import Client
from tests.server.wire import Wire

START_SECONDS = 30.0
_POLL_SECONDS = 0.005
#: every so many kills of workers it is the launcher's turn.
_WORKER_LIVES = 7


@dataclass(frozen=True)
class Plan:
    """What a loop does. ``workers`` of 0: one server without workers."""

    kills: int
    seed: int = 1974
    clients: int = 8
    workers: int = 0

    def flags(self, pressure: bool, flushed: bool) -> list[str]:
        """Limits that evict all the time, though not what is pinned, or none.

        ``flushed``: each store is, before its answer; then all below 64 KiB rides in the logs.
        """
        flags = ["--kvcache", "--wal-size", "1", "--appendfsync", "always" if flushed else "no"]
        if self.workers:
            flags += ["-w", str(self.workers), "--independent-workers"]
        if pressure:
            sessions = 5 * self.clients // max(1, self.workers)
            # logs and snapshots of each server count, and 5 MB that every client may be sending
            budget = 12 + 8 * max(1, self.workers) + 4 * self.clients
            flags += ["--max-sessions", str(sessions), "--disk-budget", f"{budget}m"]
        return flags


@dataclass
class Tally:
    """What happened. The kills are counted by what was under way in them."""

    seed: int
    kills: int = 0
    launcher_kills: int = 0
    start_kills: int = 0
    writing: int = 0
    uploading: int = 0
    mapping: int = 0
    saving: int = 0
    mapping_or_saving: int = 0
    exporting: int = 0
    temporary: int = 0
    orphans: int = 0
    acknowledged: int = 0
    bytes_checked: int = 0
    evicted: int = 0
    expired: int = 0
    hits: int = 0
    files: int = 0
    sealed: int = 0
    shared: int = 0

    def summary(self) -> str:
        """One line."""
        return (
            f"seed {self.seed}: {self.kills} kills ({self.launcher_kills} of a launcher, "
            f"{self.start_kills} while starting), in flight: {self.writing} write "
            f"({self.uploading} of megabytes), {self.mapping} MAP, {self.saving} SAVE, "
            f"{self.exporting} EXPORT, {self.temporary} half-written snapshots or logs, "
            f"{self.orphans} unnamed segments; "
            f"{self.acknowledged} writes acknowledged, {self.bytes_checked / 1e6:.0f} MB checked, "
            f"{self.hits} complete prefixes, {self.files} mapped or exported files, "
            f"{self.evicted} evicted, {self.expired} expired, {self.sealed} sealed segments opened"
            f" ({self.shared} of them with rows of several prefixes)"
        )


class Moment:
    """The moment to kill: a command of the wanted kind has just been sent by somebody."""

    def __init__(self) -> None:
        self._wanted = ""
        self._come = threading.Event()
        self._sender = -1

    def told(self, client: int, kinds: frozenset[str]) -> None:
        """A client sends a command of these kinds."""
        if self._wanted in kinds:
            self._wanted, self._sender = "", client
            self._come.set()

    def wait_for(self, kind: str, seconds: float) -> int:
        """Wait, not for ever; the number of the client, -1 where none has sent one."""
        self._come.clear()
        self._sender = -1
        self._wanted = kind
        self._come.wait(seconds)
        self._wanted = ""
        return self._sender


class Victim:
    """The server that is killed, and its port."""

    def __init__(self, starter: Starter, folder: Path, plan: Plan) -> None:
        self.starter = starter
        self.folder = folder
        self.plan = plan
        self.port = free_port_block(2 + max(1, plan.workers))
        self.log = folder.parent / "server.log"
        self.pid = 0
        #: worker → its process, as it was when the last clients were let in
        self.serving: dict[int, int] = {}

    def port_of(self, worker: int) -> int:
        """Where a client of that worker connects."""
        return self.port + 2 + worker if self.plan.workers else self.port

    def launch(self, pressure: bool, flushed: bool = False) -> None:
        """Start it; it may not listen yet."""
        arguments = ["-p", str(self.port), "--dir", str(self.folder)]
        arguments += self.plan.flags(pressure, flushed)
        self.pid = self.starter.start(self.log, *arguments)

    def wait_until_ready(self) -> None:
        """Until every worker answers PING."""
        deadline = time.monotonic() + START_SECONDS
        for worker in range(max(1, self.plan.workers)):
            while not _answers(self.port_of(worker)):
                assert time.monotonic() < deadline, f"it does not start:\n{self.output()[-4000:]}"
                time.sleep(_POLL_SECONDS)
        for worker in range(self.plan.workers):
            with Wire.tcp(self.port_of(worker)) as wire:
                self.serving[worker] = int(wire.info("INFO", "server")["worker_process_id"])

    def kill(self) -> None:
        """SIGKILL the server; the workers of a launcher are left to find out."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.starter.wait(self.pid) == -signal.SIGKILL, self.output()[-4000:]
        self.pid = 0

    def kill_everything(self) -> None:
        """SIGKILL the server with its workers."""
        self.kill()
        for pid in self.serving.values():
            kill_if_there(pid)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        os.kill(self.pid, signal.SIGTERM)
        assert self.starter.wait(self.pid) == 0, self.output()[-4000:]
        self.pid = 0

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def temporary_files(self, workers: Iterable[int]) -> int:
        """Snapshots and logs of these workers that are half written."""
        return sum(len(list(self.folder.glob(f"pion.*.{worker}.tmp"))) for worker in workers)


def kill_if_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=START_SECONDS) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(16)[:1] == b"+"
    except OSError:
        return False


@dataclass
class KillLoop:
    """See the module's docstring."""

    victim: Victim
    plan: Plan
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally(self.plan.seed)
        self.chance = random.Random(f"{self.plan.seed} driver")
        self.moment = Moment()
        seeds = range(self.plan.clients)
        self.clients = [Client(n, self.plan.seed, self.moment.told) for n in seeds]

    @property
    def _workers(self) -> range:
        return range(max(1, self.plan.workers))

    def _worker_of(self, client: Client) -> int:
        return client.number % len(self._workers)

    def run(self) -> Tally:
        """All kills; afterwards the server runs, and everything was compared."""
        self._start()
        while self.tally.kills < self.plan.kills:
            self._round()
        for counts in (client.counts for client in self.clients):
            self.tally.acknowledged += counts.acknowledged
            self.tally.bytes_checked += counts.bytes_checked
            self.tally.evicted += counts.evicted
            self.tally.expired += counts.expired
            self.tally.hits += counts.hits
            self.tally.files += counts.files
        self._read_log()
        return self.tally

    def start_again(self) -> None:
        """Start the server after ``run``, for a last comparison."""
        self.victim.launch(pressure=False)
        self.victim.wait_until_ready()
        self._check()

    def _start(self) -> None:
        """Begin a life of the server; sometimes the one before it ends while it recovers."""
        pressure = self.chance.random() < 0.5
        if not self.plan.workers and self.tally.kills and self.chance.random() < 0.15:
            self.victim.launch(pressure)
            time.sleep(self.chance.random() * 0.06)
            self.victim.kill()
            self.tally.kills += 1
            self.tally.start_kills += 1
        self.victim.launch(pressure, flushed=self.chance.random() < 0.3)
        self.victim.wait_until_ready()
        for client in self.clients:
            # a start keeps to its limits by itself: what goes now was allowed to stay before
            client.pressure = client.pressure or pressure
        self._check()
        saves = self.chance.choice((2, 40))
        for client in self.clients:
            client.pressure, client.saves = pressure, saves

    def _round(self) -> None:
        threads = [self._begin(client) for client in self.clients]
        dead = self._kill(self._wait_for_a_moment())
        if self.victim.pid:
            # the clients of the other workers go on meanwhile
            self._kill_while_starting()
            self.victim.wait_until_ready()
        for client in self.clients:
            client.stop.set()
        for thread in threads:
            thread.join(START_SECONDS)
            assert not thread.is_alive(), f"{self._where()}: a client waits for ever"
        self._count(dead)
        if self.victim.pid:
            self._check()
        else:
            self._start()

    def _begin(self, client: Client) -> threading.Thread:
        client.stop.clear()
        client.killed.clear()
        port = self.victim.port_of(self._worker_of(client))
        thread = threading.Thread(target=client.run, args=(port,), daemon=True)
        thread.start()
        return thread

    def _wait_for_a_moment(self) -> int:
        """Let the clients work for a while; the one that has just sent what was waited for."""
        kinds = {"": 3, "write": 2, "long": 2, "upload": 4, "map": 5, "save": 5, "export": 2}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        time.sleep(self.chance.uniform(0.02, 0.2))
        sender = self.moment.wait_for(kind, seconds=0.5) if kind else -1
        time.sleep(self.chance.choice((0, 0, 0.0005, 0.001, 0.002, 0.004, 0.008)))
        return sender

    def _kill(self, sender: int) -> set[int]:
        """Kill the server, or some of its workers: which workers are dead.

        ``sender``: the client whose worker is among them, -1: any.
        """
        self.tally.kills += 1
        everything = not self.plan.workers or self.tally.kills % _WORKER_LIVES == 0
        dead = set(self._workers) if everything else self._some_workers(sender)
        pids = [self.victim.serving[n] for n in dead] if self.plan.workers else []
        for client in self.clients:
            if self._worker_of(client) in dead:
                client.killed.set()
        if everything:
            self.victim.kill()
            self.tally.launcher_kills += bool(self.plan.workers)
        # the workers of a dead launcher end by themselves, or are killed with it
        if not everything or self.chance.random() < 0.5:
            for pid in pids:
                kill_if_there(pid)
        self.tally.temporary += self.victim.temporary_files(dead)
        return dead

    def _kill_while_starting(self) -> None:
        """Sometimes, kill a worker that takes another's place before it has recovered."""
        if self.chance.random() < 0.15:
            time.sleep(self.chance.random() * 0.5)
            newest = max(psutil.Process(self.victim.pid).children(), key=lambda p: p.create_time())
            if newest.pid not in self.victim.serving.values():
                kill_if_there(newest.pid)
                self.tally.kills += 1
                self.tally.start_kills += 1

    def _some_workers(self, sender: int) -> set[int]:
        workers = list(self._workers)
        if self.chance.random() < 0.15:
            return set(workers)
        return {self.chance.choice(workers) if sender < 0 else sender % len(workers)}

    def _count(self, dead: set[int]) -> None:
        """What was under way in the workers that are dead. Raises what went wrong."""
        failures = [f"client {c.number}: {c.failure}" for c in self.clients if c.failure]
        if failures:
            raise AssertionError(self._where() + "\n" + "\n".join(failures))
        kinds: set[str] = set()
        for client in self.clients:
            if client.sending is not None:
                assert self._worker_of(client) in dead, f"client {client.number} got no answer"
                kinds |= client.sending.kinds
        tally = self.tally
        tally.writing += "write" in kinds
        tally.uploading += "upload" in kinds
        tally.mapping += "map" in kinds
        tally.saving += "save" in kinds
        tally.mapping_or_saving += bool(kinds & {"map", "save"})
        tally.exporting += "export" in kinds

    def _check(self) -> None:
        """Every client compares what it knows with what is there."""
        for client in self.clients:
            with Wire.tcp(self.victim.port_of(self._worker_of(client))) as wire:
                try:
                    client.check(wire)
                except AssertionError as error:
                    history = "\n".join(client.history)
                    raise AssertionError(f"{self._where()}: {error}\n{history}") from None
        for worker in self._workers:
            with Wire.tcp(self.victim.port_of(worker)) as wire:
                assert wire.info("KV.PREFIX.INFO")["vstore_damaged"] == "0", self._where()
                self._check_owners(wire)

    def _check_owners(self, wire: Wire) -> None:
        """Whoever is asked: a whole prefix is where its client stored it."""
        if not self.plan.workers:
            return
        for client in self.clients:
            for prefix in [prefix for prefix in client.prefixes if not prefix.gone]:
                owner = wire.ask("KV.PREFIX.OWNER", prefix.name)
                here = owner == str(self._worker_of(client))
                over = prefix.until[0] <= time.time()
                assert here or over, (self._where(), prefix.name, owner)

    def _where(self) -> str:
        return f"seed {self.plan.seed}, after kill {self.tally.kills}"

    def _read_log(self) -> None:
        """What the server said about its starts."""
        output = self.victim.output()
        for word in ("Traceback", "FATAL", "damaged", "missing"):
            assert word not in output, output[max(0, output.index(word) - 2000) :][:4000]
        found = re.findall(r"(\d+) segment files that nothing names", output)
        self.tally.orphans = sum(map(int, found))


@contextmanager
def kill_loop(folder: Path, plan: Plan) -> Iterator[KillLoop]:
    """A loop on an empty folder; its server is gone at the end."""
    with Starter() as starter:
        yield KillLoop(Victim(starter, folder, plan), plan)
