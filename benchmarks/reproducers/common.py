"""What every reproducer shares: a server of its own, alternating runs, one JSON line.

A *side* is one of the things compared. All sides of a comparison run in turn, ``PAIRS``
times after one run that does not count, so that what drifts on the machine drifts for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pion_vllm_mlx.cache.channel import Address
from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.config import child_environment

PAIRS = 9
PORT_BLOCK = 4
REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
DEADLINE_SECONDS = 120.0
START_SECONDS = 60.0
MB = 1_000_000
#: processors used by others in what counts as a quiet moment.
QUIET_SHARE = 0.1


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every reproducer has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="a fresh folder is made in here (default: .)"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs of every side")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--save", action="store_true", help="keep the line in results/")
    return parser


@contextmanager
def fresh_folder(parent: Path) -> Iterator[Path]:
    """A new private folder in ``parent``, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=".benchmark-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that is free with the three behind it, which a server may take too.

    Below the range from which the system takes ports of outgoing connections.
    """
    for base in random.sample(range(12_000, 32_000, PORT_BLOCK), 200):
        if all(_is_free(base + step) for step in range(PORT_BLOCK)):
            return base
    raise SystemExit("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def environment() -> dict[str, str]:
    """A child's environment: the package is found where this script found it."""
    return child_environment({"PYTHONPATH": str(REPOSITORY)})


@dataclass
class Process:
    """A child process that answers PING on a port, and a Unix socket beside it."""

    command: list[str]
    port: int
    folder: Path
    unixsocket: Path
    child: subprocess.Popen[bytes] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> Process:
        """Start it and wait for its first answer."""
        with (self.folder / "output.log").open("ab") as log:
            self.child = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ends_at = time.monotonic() + START_SECONDS
        while not _answers(self.port):
            if self.child.poll() is not None or time.monotonic() > ends_at:
                self.stop()
                raise SystemExit((self.folder / "output.log").read_text(errors="replace"))
            time.sleep(0.01)
        return self

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait."""
        if self.child is None:
            return
        if self.child.poll() is None:
            self.child.send_signal(number)
        try:
            self.child.wait(30)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def connect(self, *, unix: bool = False) -> RespConnection:
        """A client of it."""
        address = Address(path=str(self.unixsocket)) if unix else Address(port=self.port)
        return RespConnection(address, deadline_seconds=DEADLINE_SECONDS)

    def raw_socket(self, *, unix: bool = False) -> socket.socket:
        """A bare blocking socket to it."""
        if unix:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(str(self.unixsocket))
            return sock
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(16)[:1] in (b"+", b"-")
    except OSError:
        return False


@contextmanager
def running(command: Callable[[int, Path], list[str]], folder: Path) -> Iterator[Process]:
    """Run a server; ``command`` gets its port and its Unix socket's path."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-") as short:  # a socket's path is short
        port, unix = free_port(), Path(short) / "s"
        process = Process(command(port, unix), port, folder, unix)
        try:
            yield process.start()
        finally:
            process.stop()


@contextmanager
def pion_server(folder: Path, *flags: str) -> Iterator[Process]:
    """The bundled server with its data in ``folder``/data."""

    def command(port: int, unix: Path) -> list[str]:
        words = [sys.executable, "-m", "pion_vllm_mlx", "server", "--kvcache", "-p", str(port)]
        words += ["--dir", str(folder / "data"), "--unixsocket", str(unix)]
        return [*words, *flags]

    with running(command, folder) as process:
        yield process


@contextmanager
def redis_server(folder: Path) -> Iterator[Process]:
    """A redis-server that keeps everything in memory. SystemExit when there is none."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed")

    def command(port: int, unix: Path) -> list[str]:
        words = [binary, "--port", str(port), "--unixsocket", str(unix), "--save", ""]
        return [*words, "--appendonly", "no", "--dir", str(folder)]

    with running(command, folder) as process:
        yield process


def busy_share(seconds: float) -> float:
    """What share of the processors' time was used during the next ``seconds``; 0 unknown."""

    def ticks() -> tuple[int, int]:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    if not Path("/proc/stat").exists():
        return 0.0
    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    return 1.0 - (idle_after - idle_before) / max(1, all_after - all_before)


def wait_until_quiet(patience_seconds: float) -> None:
    """Wait for a moment in which nobody else uses the machine, or until patience ends."""
    ends_at = time.monotonic() + patience_seconds
    while time.monotonic() < ends_at and busy_share(0.15) > QUIET_SHARE:
        pass


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    pairs: int = PAIRS,
    patience_seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of every side, run in turn. A side may return its own seconds as a float.

    Each turn waits for a quiet moment as long as ``patience_seconds``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(pairs + 1):
        wait_until_quiet(patience_seconds)
        for name, side in sides.items():
            started = time.perf_counter()
            own = side()
            took = own if isinstance(own, float) else time.perf_counter() - started
            if turn:
                seconds[name].append(took)
    return seconds


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """A side's times in ms."""
    return spread([1e3 * value for value in seconds])


def rates(nbytes: int, seconds: Sequence[float]) -> dict[str, float]:
    """A side's throughput in GB/s."""
    return spread([nbytes / value / 1e9 for value in seconds], 3)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ours over theirs, pair by pair."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], 3)


def check(ratio: float, bar: float, *, at_least: bool) -> dict[str, Any]:
    """A figure against its bar."""
    good = ratio >= bar if at_least else ratio <= bar
    return {"value": round(ratio, 3), "bar": f"{'>=' if at_least else '<='} {bar}", "pass": good}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def machine() -> str:
    """Processor, cores, system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def versions(*more: str) -> dict[str, str]:
    """Python and the packages that a figure depends on."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "uvloop", "crc32c", *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, str]:
    """The commit that ran, with ``+`` where files were changed; nothing outside a checkout."""
    git = shutil.which("git")
    if git is None or not (REPOSITORY / ".git").exists():
        return {}
    words = [git, "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return {"commit": found.stdout.strip()} if found.returncode == 0 else {}


def report(
    name: str, options: argparse.Namespace, figures: Mapping[str, Any], *packages: str
) -> None:
    """Print the one JSON line; with ``--save`` keep it in results/NAME.json too."""
    line = {
        "name": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(*packages),
        **commit(),
        "pairs": options.pairs,
        "load_average": round(os.getloadavg()[0], 1),
        **figures,
    }
    text = json.dumps(line)
    print(text, flush=True)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")
