"""A fetch is of one moment, however slowly it is read and whatever others write meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.formats import resolve
from pion_vllm_mlx.server.store.files import FileHandle
from pion_vllm_mlx.server.store.index import Extent, LayerRows, Run
from pion_vllm_mlx.server.store.shapes import LayerSpec, RunShape
from pion_vllm_mlx.server.store.wal import Inline
from tests.conftest import RunningServer
from tests.server.wire import Wire, request

WIDTH, ROWS = 1024, 4096

ENCODINGS = {
    "float32": ("RANGE", 0, ROWS),
    "native": ("RANGE", 0, ROWS, "FMT", "NATIVE"),
    "other layout": ("RANGE", 0, ROWS, "FMT", "STORED", "LAYOUT", "HND"),
    "all layers": ("BATCH", 0, ROWS),
    "ids": tuple(range(ROWS)),
}


def blob(value: int) -> bytes:
    return np.full((ROWS, WIDTH), value, "<f2").tobytes()


@pytest.fixture
def slow(shared: RunningServer) -> Iterator[Wire]:
    """A connection that takes little of a reply before it is read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", shared.port))
    with Wire(sock) as connection:
        yield connection


@pytest.mark.parametrize("change", ["overwritten", "restored", "dropped"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_reply_holds_what_was_there_when_it_was_asked_for(
    wire: Wire, slow: Wire, ns: str, encoding: str, change: str
) -> None:
    sid = ns + "_pk"
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "HEADS", 2)
    empty = wire.ask("V.SNAPSHOT", sid)
    wire.ok("V.STOREBATCH", sid, 0, 0, ROWS, blob(1), "FMT", "F16")
    words = ENCODINGS[encoding]
    slow.send(request("V.FETCH", sid, *(() if encoding == "all layers" else (0,)), *words))
    # the reply has begun; the rest of it waits for its reader
    header = slow.incoming.readline()
    if encoding == "all layers":
        header = slow.incoming.readline()
    if change == "overwritten":
        wire.ok("V.STOREBATCH", sid, 0, 0, ROWS, blob(2), "FMT", "F16")
    elif change == "restored":
        assert wire.ask("V.RESTORE", sid, empty) not in (None, "")
    else:
        assert wire.ask("KV.PREFIX.DROP", ns) == 1
    data = slow.incoming.read(int(header[1:]))
    assert len(data) == int(header[1:])
    kind = "<f2" if encoding in ("native", "other layout") else "<f4"
    assert np.unique(np.frombuffer(data, kind)).tolist() == [1.0]


class Counted(list[Extent]):
    """Extents that count how many of them are looked at."""

    looked_at = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        self.looked_at += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Extent]:
        for index in range(len(self)):
            yield self[index]


def test_a_token_is_found_among_many_runs_without_looking_at_each() -> None:
    spec = LayerSpec(4, resolve("fp16", 4).name)
    shape = RunShape.dense(spec, 1, False)
    runs = [
        Run(n, 2 * n, shape, Inline(FileHandle.missing(Path()), 0), 0, 0, True, 1)
        for n in range(1000)
    ]
    rows = LayerRows(spec, 2000, Counted(Extent(r.start, r.start + 1, r, 0) for r in runs))
    for token in range(2000):
        extents = rows.extents
        assert isinstance(extents, Counted)
        extents.looked_at = 0
        assert rows.shows(token) is (token % 2 == 0)
        assert [e.run.run_id for e in rows.covering(token, token + 1)] == [token // 2][
            : 1 - token % 2
        ]
        assert extents.looked_at < 40
    assert [e.start for e in rows.covering(9, 15)] == [10, 12, 14]
    assert list(rows.covering(10, 10)) == [] and not list(rows.covering(12, 3))
    assert [e.start for e in rows.as_now(9, 15).extents] == [10, 12, 14]
