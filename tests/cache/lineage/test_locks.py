"""One writer a tree; one that was killed holds nobody up, one that lives is left alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pion_vllm_mlx.cache.lineage import presence
from pion_vllm_mlx.cache.lineage.client import LineageClient, connect
from pion_vllm_mlx.cache.lineage.index import Names
from pion_vllm_mlx.cache.lineage.locks import LOCK_SECONDS, Contended, acquire, release
from pion_vllm_mlx.cache.lineage.presence import has_died
from pion_vllm_mlx.cache.lineage.types import LineageOptions
from pion_vllm_mlx.config import socket_dir
from tests.cache.lineage.driving import url_of
from tests.conftest import RunningServer

NAMES = Names("m" * 16)
SHORT = LOCK_SECONDS / 4
"""Patience that a lock outlives."""

# Takes the lock of one tree, says under which token, and lives until its input ends.
_WRITER = """
import sys
from pion_vllm_mlx.cache.lineage.client import connect
from pion_vllm_mlx.cache.lineage.index import Names
from pion_vllm_mlx.cache.lineage.locks import acquire
from pion_vllm_mlx.cache.lineage.types import LineageOptions
client = connect(LineageOptions(url=sys.argv[1]))
print(acquire(client, Names(sys.argv[2]), "root", 5.0).token, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client(own: RunningServer) -> Iterator[LineageClient]:
    one = connect(LineageOptions(url=url_of(own)))
    yield one
    one.close()


@contextmanager
def writer(server: RunningServer) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that holds the lock, and its token."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, url_of(server), NAMES.mid],
        cwd=Path(__file__).parents[3],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def file_of(token: str) -> Path:
    return socket_dir() / f"writer-{token.partition('-')[0]}"


def test_the_lock_of_a_writer_that_was_killed_is_taken_over(
    own: RunningServer, client: LineageClient
) -> None:
    with writer(own) as (process, token):
        process.kill()
        process.wait()
        lock = acquire(client, NAMES, "root", SHORT)
        assert lock.token != token
        release(client, NAMES, lock)
    file_of(token).unlink()


def test_a_writer_that_lives_is_left_its_lock(own: RunningServer, client: LineageClient) -> None:
    with writer(own) as (_, token):
        with pytest.raises(Contended):
            acquire(client, NAMES, "root", SHORT)
        assert client.demand(NAMES.route, [("GET", NAMES.key("lock:root"))]) == [token.encode()]
        acquire(client, NAMES, "another root", SHORT)
        file_of(token).unlink()


def test_a_writer_that_has_no_file_here_is_waited_for(
    own: RunningServer, client: LineageClient
) -> None:
    """It may be on another machine: nobody knows whether it lives."""
    with writer(own) as (process, token):
        process.kill()
        process.wait()
        file_of(token).unlink()
        with pytest.raises(Contended):
            acquire(client, NAMES, "root", SHORT)


def test_without_a_folder_of_its_own_a_client_writes_all_the_same(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise PermissionError("no folder")

    monkeypatch.setattr(presence, "socket_dir", nowhere)
    with contextlib.closing(connect(LineageOptions(url=url_of(own)))) as one:
        lock = acquire(one, NAMES, "root", SHORT)
        with pytest.raises(Contended):
            acquire(one, NAMES, "root", SHORT)
        release(one, NAMES, lock)
        acquire(one, NAMES, "root", SHORT)


def test_two_clients_of_one_process_leave_each_other_alone(
    own: RunningServer, client: LineageClient
) -> None:
    with contextlib.closing(connect(LineageOptions(url=url_of(own)))) as other:
        lock = acquire(client, NAMES, "root", SHORT)
        with pytest.raises(Contended):
            acquire(other, NAMES, "root", SHORT)
        release(client, NAMES, lock)
        acquire(other, NAMES, "root", SHORT)


def test_a_client_that_is_dropped_leaves_no_file_and_a_forked_child_has_its_own() -> None:
    one = presence.Presence()
    name = one.name()
    path = file_of(name)
    assert path.exists() and not has_died(name)
    reader, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, one.name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 64).decode()
    os.close(reader)
    os.close(writes)
    assert theirs != name and has_died(theirs) and not has_died(name)
    file_of(theirs).unlink()
    del one
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "../x", "0" * 15, "0" * 16, "g" * 16, "0" * 16 + "\n"])
def test_a_name_that_is_nobodys_here_has_not_died(name: str) -> None:
    assert not has_died(name)


def test_old_files_of_killed_clients_are_removed_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(presence, "socket_dir", lambda: tmp_path)
    alive = presence.Presence()
    old, young, other = (tmp_path / n for n in ("writer-" + "0" * 16, "writer-" + "1" * 16, "x"))
    for path in (old, young, other):
        path.touch()
    lives = tmp_path / ("writer-" + alive.name())
    for path in (old, lives, other):
        os.utime(path, (0, 0))
    second = presence.Presence()
    assert second.name()
    assert not old.exists() and young.exists() and lives.exists() and other.exists()
