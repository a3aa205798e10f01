"""The directory that workers share: what one says all know, also over rewrites and deaths."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import shared_directory as module
from pion_vllm_mlx.server.directory import Directory, Known, sides_of
from pion_vllm_mlx.server.directory_file import DirectoryFile
from pion_vllm_mlx.server.shared_directory import SharedDirectory


def opened(path: Path, worker: int, ns_prefix: bytes = b"") -> SharedDirectory:
    return SharedDirectory(os.open(path, os.O_RDWR | os.O_CREAT), worker, ns_prefix)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedDirectory, SharedDirectory]]:
    path = tmp_path / "directory"
    both = opened(path, 0), opened(path, 1)
    yield both
    for one in both:
        one.close()


Pair = tuple[SharedDirectory, SharedDirectory]

#: some of them are lineages of one segment
NAMES = [b"n%d" % number for number in range(6)] + [b"pps%ds1" % number for number in range(6)]


def publish(directory: Directory, namespace: bytes, tokens: int = 0, deadline: int = 0) -> None:
    keys, values = sides_of(namespace)
    directory.publish({keys: Known(tokens, deadline), values: Known(0, deadline)})


def test_a_claim_keeps_others_out_and_is_no_hit(pair: Pair) -> None:
    a, b = pair
    assert a.claim(sides_of(b"n")) is None
    assert b.claim(sides_of(b"n")) == 0
    assert b.elsewhere(b"n") is None
    publish(a, b"n", 7)
    assert b.elsewhere(b"n") == 7
    assert a.elsewhere(b"n") is None and a.home(sides_of(b"n")) is None


def test_one_side_keeps_the_other_together_with_it(pair: Pair) -> None:
    a, b = pair
    assert a.claim([b"n_pk"]) is None
    assert b.claim([b"n_pv"]) == 0
    assert b.claim([b"n"]) is None


def test_a_claim_of_which_nothing_came_is_taken_back(pair: Pair) -> None:
    a, b = pair
    assert a.claim(sides_of(b"n")) is None
    a.release()
    assert b.claim(sides_of(b"n")) is None
    assert a.claim(sides_of(b"n")) == 1
    assert b.claim(sides_of(b"other")) is None
    assert a.claim(sides_of(b"n")) is None


def test_what_a_worker_no_longer_has_after_a_restart_is_gone(pair: Pair) -> None:
    a, b = pair
    publish(a, b"kept")
    publish(a, b"lost")
    publish(b, b"theirs")
    again = {sid: Known(3, 0) for name in (b"kept", b"theirs") for sid in sides_of(name)}
    assert set(a.start(again)) == set(sides_of(b"theirs"))
    assert b.elsewhere(b"kept") == 3
    assert b.elsewhere(b"lost") is None
    assert a.elsewhere(b"theirs") == 0


def test_a_deadline_ends_hits_elsewhere(pair: Pair) -> None:
    a, b = pair
    publish(a, b"n", deadline=1)
    assert b.elsewhere(b"n") is None
    publish(a, b"n", deadline=1 << 60)
    assert b.elsewhere(b"n") == 0


def test_the_segments_of_a_lineage_stay_together(pair: Pair) -> None:
    a, b = pair
    assert a.lineage_home(b"pps12") is None and b.lineage_home(b"pps12") is None
    publish(a, b"pps12s1")
    assert b.lineage_home(b"pps12") == 0 and a.lineage_home(b"pps12") is None
    assert b.claim(sides_of(b"pps12s2")) == 0
    assert a.claim(sides_of(b"pps12s2")) is None
    a.release()
    for free in (b"pps12", b"pps12s", b"pps123s1", b"xpps12s1", b"pps12s1x"):
        assert b.claim(sides_of(free)) is None, free
        b.release()
    a.publish(dict.fromkeys(sides_of(b"pps12s1")))
    assert b.lineage_home(b"pps12") is None
    assert b.claim(sides_of(b"pps12s7")) is None
    publish(b, b"pps12s7")
    assert a.lineage_home(b"pps12") == 1


def test_a_required_prefix_comes_before_the_names_of_lineages(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / "directory", n, b"mine-") for n in (0, 1))
    publish(a, b"mine-pps12s1")
    assert b.claim(sides_of(b"mine-pps12s2")) == 0
    a.close()
    b.close()


def test_a_namespace_elsewhere_is_past_its_deadline_for_all(pair: Pair) -> None:
    a, b = pair
    publish(a, b"n", deadline=1)
    assert b.expired(b"n") and not b.expired(b"other")
    publish(a, b"n", deadline=1 << 60)
    assert not b.expired(b"n")


def test_prefill_times_and_touches_reach_the_others(pair: Pair) -> None:
    a, b = pair
    publish(a, b"n")
    b.set_prefill(b"n", 40)
    b.touch(b"n")
    assert b.exchange() == set()
    assert a.exchange() == {b"n"}
    assert a.exchange() == set()
    assert a.prefill_ms == {b"n": 40}
    a.publish(dict.fromkeys(sides_of(b"n")))
    b.exchange()
    assert b.prefill_ms == {}


def test_all_agree_after_many_changes_and_rewrites(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_KEEP_BYTES", 500)
    for directory in pair:
        directory._rewrite_at = 500
    draw = random.Random(5)
    model: dict[bytes, tuple[int, int]] = {}
    for step in range(2000):
        worker = draw.randrange(2)
        name = NAMES[draw.randrange(12)]
        directory = pair[worker]
        owner = model.get(name, (worker, 0))[0]
        assert (directory.claim(sides_of(name)) is None) == (owner == worker)
        if owner != worker:
            continue
        if draw.random() < 0.3:
            directory.publish(dict.fromkeys(sides_of(name)))
            model.pop(name, None)
        else:
            publish(directory, name, step)
            model[name] = worker, step
        asked = draw.randrange(2)
        for known in NAMES:
            at, tokens = model.get(known, (asked, 0))
            assert pair[asked].elsewhere(known) == (None if at == asked else tokens)
    late = opened(tmp_path / "directory", 2)
    assert late.count() == 2 * len(model)
    assert late._generation > 3
    assert late._lineages == pair[0]._lineages == pair[1]._lineages
    late.close()


def _change_for_ever(path: Path) -> None:
    directory = opened(path, 1)
    step = 0
    while True:
        step += 1
        publish(directory, b"n%d" % (step % 40), step)


def test_a_worker_killed_while_it_writes_leaves_a_directory_that_works(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    directory = opened(path, 0)
    publish(directory, b"mine", 5)
    for _ in range(5):
        process = get_context("spawn").Process(target=_change_for_ever, args=(path,))
        process.start()
        before = directory.count()
        while directory.count() == before and before < 80:
            pass
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        publish(directory, b"mine", 5)
        fresh = opened(path, 2)
        assert fresh.elsewhere(b"mine") == 5
        assert directory.count() == fresh.count() and fresh._listed == directory._listed
        fresh.close()
    directory.close()


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """As on a disk that fills up: a write takes what fits, the next one is refused."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_the_disk_refuses_happens_here_and_is_told_when_it_does_not(
    pair: Pair, tmp_path: Path
) -> None:
    a, b = pair
    publish(a, b"old", 1)
    path = tmp_path / "directory"
    for spare in (0, 10):
        with no_file_longer_than(path.stat().st_size + spare):
            publish(a, b"new%d" % spare, 7)
            a.publish(dict.fromkeys(sides_of(b"old")))
            a.set_prefill(b"new0", 40)
            a.touch(b"other")
            assert a.exchange() == set() and b.exchange() == set()
            with pytest.raises(CommandError, match="the directory of workers could not be written"):
                a.claim(sides_of(b"claimed"))
            with pytest.raises(CommandError):
                b.claim(sides_of(b"theirs"))
            assert b.elsewhere(b"old") == 1 and b.count() == a.count() == 2
        assert b.claim(sides_of(b"claimed")) is None
        b.release()
        a.exchange()
        assert b.elsewhere(b"old") is None and b.elsewhere(b"new%d" % spare) == 7
        fresh = opened(path, 2)
        assert fresh.count() == b.count() == 2
        fresh.close()
        publish(a, b"old", 1)
        a.publish(dict.fromkeys(sides_of(b"new%d" % spare)))


def test_what_a_worker_recovers_on_a_full_disk_is_told_later(pair: Pair, tmp_path: Path) -> None:
    a, b = pair
    publish(a, b"lost", 1)
    recovered = {sid: Known(3, 0) for sid in sides_of(b"kept")}
    with no_file_longer_than((tmp_path / "directory").stat().st_size + 10):
        assert a.start(recovered) == []
        assert b.elsewhere(b"kept") is None
    a.exchange()
    assert b.elsewhere(b"kept") == 3 and b.elsewhere(b"lost") is None


def test_a_log_that_cannot_be_rewritten_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_KEEP_BYTES", 500)
    a, b = pair
    a._rewrite_at = 500
    with no_file_longer_than(1 << 20):  # the other area begins far behind
        for step in range(40):
            publish(a, b"n", step)
    assert b.elsewhere(b"n") == 39 and a._generation == 0
    for step in range(40):
        publish(a, b"n", step)
    assert b.elsewhere(b"n") == 39 and a._generation > 0


def _hold_one(descriptor: int, worker: int) -> None:
    directory = SharedDirectory(descriptor, worker)
    for step in range(300):
        assert directory.claim(sides_of(b"n%d-%d" % (worker, step))) is None
        publish(directory, b"n%d-%d" % (worker, step), step)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_file_has_no_name_and_all_who_inherit_it_share_it(
    tmp_path: Path, in_memory: bool
) -> None:
    (tmp_path / "pion.directory").write_bytes(b"of an earlier server")
    file = DirectoryFile(tmp_path, in_memory)
    assert not list(tmp_path.iterdir())
    context = get_context("fork")
    workers = [context.Process(target=_hold_one, args=(file.descriptor, n)) for n in (0, 1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    last = SharedDirectory(os.dup(file.descriptor), 3)
    assert last.count() == 2 * 3 * 300
    last.close()
    file.close()
    file.close()
