"""The embedded server: who starts it, who shares it, and that the last one out stops it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pion_vllm_mlx.cache import embedded
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.data_folder import read_status
from pion_vllm_mlx.errors import StoreUnavailable
from tests.conftest import RunningServer

GONE_SECONDS = 5.0

# A process of its own that attaches, says which server it got, and holds it until its input ends.
HOLDER = """
import sys
from pion_vllm_mlx.cache import embedded
server = embedded.attach(sys.argv[1])
print(server.pid, flush=True)
sys.stdin.read()
"""


class Holder:
    """A process attached to the server of a folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def server_pid(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def leave(self) -> None:
        """End as a process does that returns from its main module."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(timeout=20) == 0
        self._close()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait(timeout=20)
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A data folder; whatever server is left in it is ended by its process id."""
    path = tmp_path / "embedded"
    yield path
    status = read_status(path)
    if status is not None and runs(status.pid):
        os.kill(status.pid, signal.SIGKILL)


@pytest.fixture
def start(folder: Path) -> Iterator[type[Holder]]:
    """``Holder``, with every process it starts ended afterwards."""
    started: list[Holder] = []

    class Tracked(Holder):
        def __init__(self, path: Path = folder) -> None:
            super().__init__(path)
            started.append(self)

    yield Tracked
    for holder in started:
        holder.kill()


def runs(pid: int) -> bool:
    """Whether the process exists; a zombie has ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that must happen, at most as long as an orphan may stay."""
    deadline = time.monotonic() + GONE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def assert_gone(pid: int) -> None:
    """Wait for the process to end."""
    wait_until(lambda: not runs(pid))


def ping(server: embedded.EmbeddedServer) -> object:
    connection = RespConnection(server.address)
    try:
        return connection.command("PING")
    finally:
        connection.close()


def test_a_server_is_started_and_answers_and_its_files_are_private(folder: Path) -> None:
    with embedded.attach(folder) as server:
        assert ping(server) == "PONG"
        assert server.data_dir == folder.resolve()
        assert server.address.path is not None
        assert os.stat(server.address.path).st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
        pid = server.pid
    assert_gone(pid)


def test_the_last_handle_of_the_last_process_out_stops_the_server(
    folder: Path, start: type[Holder]
) -> None:
    first = start(folder)
    pid = first.server_pid()
    second = start(folder)
    assert second.server_pid() == pid
    first.leave()
    time.sleep(3.0)  # longer than a server without connections stays
    assert runs(pid)
    second.leave()
    assert_gone(pid)


def test_a_killed_starter_leaves_the_others_working_and_no_orphan(
    folder: Path, start: type[Holder]
) -> None:
    starter = start(folder)
    pid = starter.server_pid()
    with embedded.attach(folder) as server:
        assert server.pid == pid
        starter.kill()
        time.sleep(3.0)
        assert runs(pid)
        assert ping(server) == "PONG"
    assert_gone(pid)


def test_a_killed_only_holder_leaves_no_orphan(folder: Path, start: type[Holder]) -> None:
    holder = start(folder)
    pid = holder.server_pid()
    holder.kill()
    assert_gone(pid)


def test_several_processes_that_start_at_once_share_one_server(
    folder: Path, start: type[Holder]
) -> None:
    holders = [start(folder) for _ in range(4)]
    assert len({holder.server_pid() for holder in holders}) == 1


def test_handles_of_one_process_share_one_server_and_closing_twice_counts_once(
    folder: Path,
) -> None:
    first = embedded.attach(folder)
    second = embedded.attach(folder)
    assert first.pid == second.pid
    first.close()
    first.close()
    time.sleep(3.0)
    assert second.alive() and ping(second) == "PONG"
    pid = second.pid
    second.close()
    assert_gone(pid)


def test_a_handle_that_nobody_keeps_lets_go(folder: Path) -> None:
    pid = embedded.attach(folder).pid
    assert_gone(pid)


def test_a_server_that_was_killed_is_replaced_when_asked(folder: Path) -> None:
    with embedded.attach(folder) as server:
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        assert_gone(killed)
        # A zombie's other threads may take a moment longer to close its sockets.
        wait_until(lambda: not server.alive())
        server.ensure()
        assert server.pid != killed
        assert ping(server) == "PONG"


def test_attaching_again_right_after_the_last_one_left_works(folder: Path) -> None:
    for pause in (0.0, 2.0, 2.05):
        with embedded.attach(folder) as server:
            assert ping(server) == "PONG"
        time.sleep(pause)


def test_a_folder_with_a_very_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 6)
    assert len(os.fsencode(deep)) > 104
    with embedded.attach(deep) as server:
        assert server.address.path is not None
        assert len(os.fsencode(server.address.path)) < 104
        assert ping(server) == "PONG"
        pid = server.pid
    assert_gone(pid)


def test_a_folder_is_the_same_by_whatever_name(folder: Path, tmp_path: Path) -> None:
    with embedded.attach(folder) as server:
        link = tmp_path / "link"
        link.symlink_to(folder)
        with embedded.attach(link) as other:
            assert other.pid == server.pid


def test_a_folder_owned_by_a_standalone_server_is_joined_not_started_again(
    pion_server: RunningServer,
) -> None:
    pid = pion_server.pid
    with embedded.attach(pion_server.dir) as server:
        assert server.pid == pid
        assert ping(server) == "PONG"
    time.sleep(3.0)
    assert runs(pid), "a standalone server must not stop with its clients"


def test_a_status_left_by_a_dead_server_is_not_believed(folder: Path) -> None:
    folder.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = {"pid": ended.pid, "port": 9, "unixsocket": str(folder / "nobody.sock")}
    (folder / "pion.status").write_text(json.dumps(stale))
    with embedded.attach(folder) as server:
        assert server.pid != ended.pid
        assert ping(server) == "PONG"


def test_a_status_whose_port_now_belongs_to_another_server_is_not_believed(
    folder: Path, pion_server: RunningServer
) -> None:
    folder.mkdir()
    stale = {"pid": os.getpid(), "port": pion_server.port}
    (folder / "pion.status").write_text(json.dumps(stale))
    with embedded.attach(folder) as server:
        assert server.pid not in (os.getpid(), pion_server.pid)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "port": 1}', '{"pid": 1}'])
def test_a_status_that_cannot_be_read_is_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "pion.status").write_text(text)
    assert read_status(tmp_path) is None


def test_a_forked_child_attaches_by_itself_and_an_idle_one_holds_nothing(folder: Path) -> None:
    code = """
import os, sys, time
from pion_vllm_mlx.cache import embedded
server = embedded.attach(sys.argv[1])
pid = server.pid
if os.fork() == 0:
    time.sleep(20)  # inherits the connection, never uses it
    os._exit(0)
child = os.fork()
if child == 0:
    assert server.pid == pid
    os._exit(0 if server.alive() else 1)
_, code = os.waitpid(child, 0)
print(pid, os.waitstatus_to_exitcode(code), flush=True)
os._exit(0)
"""
    done = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert done.stdout is not None
        pid, exit_code = map(int, done.stdout.readline().split())
        assert exit_code == 0
        assert done.wait(timeout=20) == 0
        assert_gone(pid)
    finally:
        os.killpg(done.pid, signal.SIGKILL)
        done.stdout.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(StoreUnavailable, match="cannot be written") as caught:
        embedded.attach(file / "data")
    assert str(file) in str(caught.value)


def test_a_read_only_folder_is_named() -> None:
    """As an ordinary user: root may write everywhere."""
    code = """
import os, sys
from pion_vllm_mlx.cache import embedded
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    embedded.attach(sys.argv[1])
except embedded.StoreUnavailable as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        data = Path(parent, "data")
        data.mkdir(mode=0o555)
        said = subprocess.run(
            [sys.executable, "-c", code, str(data)], capture_output=True, text=True, timeout=60
        )
    assert f"{data} cannot be written" in said.stdout, said.stderr
    assert "Permission denied" in said.stdout


def test_a_server_that_cannot_start_is_reported_with_its_words(folder: Path) -> None:
    folder.mkdir()
    (folder / "pion.lock").mkdir()
    with pytest.raises(StoreUnavailable, match="ended with code") as caught:
        embedded.attach(folder)
    assert "pion.lock" in str(caught.value)


def test_a_server_with_another_password_refuses_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_REQUIREPASS", "secret")
    with embedded.attach(folder) as server:
        assert server.alive()
        code = (
            "import sys\nfrom pion_vllm_mlx.cache import embedded\n"
            "try:\n    embedded.attach(sys.argv[1])\n"
            "except embedded.StoreUnavailable as error:\n    print(error)\n"
        )
        monkeypatch.setenv("PION_REQUIREPASS", "wrong")
        said = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
        )
    assert "another password" in said.stdout, said.stderr


def test_a_start_removes_the_sockets_of_killed_servers_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="p"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    try:
        with contextlib.ExitStack() as servers:
            killed, living = (
                servers.enter_context(embedded.attach(tmp_path / name))
                for name in ("killed", "living")
            )
            paths = [server.address.path for server in (killed, living)]
            assert all(path is not None and Path(path).is_socket() for path in paths)
            folder = Path(str(paths[0])).parent
            (folder / "notes.sock").touch()  # no socket
            os.kill(killed.pid, signal.SIGKILL)
            wait_until(lambda: not killed.alive())
            assert Path(str(paths[0])).is_socket()

            third = servers.enter_context(embedded.attach(tmp_path / "third"))

            left = {path.name for path in folder.iterdir()}
            kept = [Path(str(path)).name for path in (living.address.path, third.address.path)]
            assert left == {*kept, "notes.sock"}
            for server in (living, third):
                with RespConnection(server.address) as connection:
                    assert connection.command("PING") == "PONG"
            # the killed one is started again where it was
            with RespConnection(killed.ensure()) as connection:
                assert connection.command("PING") == "PONG"
    finally:
        shutil.rmtree(runtime)


def test_servers_that_start_at_once_leave_each_other_s_sockets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="p"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    holders = [Holder(tmp_path / f"folder{number}") for number in range(4)]
    try:
        for number, holder in enumerate(holders):
            pid = holder.server_pid()
            status = read_status(tmp_path / f"folder{number}")
            assert status is not None and status.pid == pid and status.unixsocket is not None
            with RespConnection(Address(path=str(status.unixsocket))) as connection:
                info = connection.command("INFO", "server")
                assert isinstance(info, bytes) and f"process_id:{pid}\r\n".encode() in info
    finally:
        for holder in holders:
            holder.kill()
        wait_until(lambda: not list(runtime.rglob("*.sock")))
        shutil.rmtree(runtime)
