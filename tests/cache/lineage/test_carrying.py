"""Rows that are read back from a conversation that has to go."""

from __future__ import annotations

from typing import Any

import numpy as np

from pion_vllm_mlx.cache.completion import CompletionRecord
from pion_vllm_mlx.cache.leaf import LeafSpec
from pion_vllm_mlx.cache.lineage.carrying import SharedRows, read_rows
from pion_vllm_mlx.cache.lineage.plan import row_bytes
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, prompt
from tests.models import tiny_model


def test_each_run_is_read_once_whatever_is_cut_out_of_it_and_the_lock_is_renewed_before_it(
    opened: Opener, monkeypatch: Any
) -> None:
    model = tiny_model(KINDS["plain"][0])
    store = opened(model)
    Engine(model, store).turn(prompt(300, 5), reply=3)
    assert store.flush(60)
    number = int(store.conversations()[0].id.rpartition(":")[2])
    client, namespace = store._front, store._key.names.namespace(number)
    blob = client.record(namespace)
    assert blob is not None
    record = CompletionRecord.decode(blob)
    leaves = [
        LeafSpec(layer, leaf["heads"], leaf["format"], leaf["k"], leaf["v"])
        for layer, leaf in enumerate(record.leaves)
    ]
    spans = [
        SharedRows(namespace, 0, run, first, end, row_bytes(leaves[run.layer], run.side))
        for run in record.runs
        for first, end in _spans(run.start, run.start + run.rows)
    ]
    done: list[str] = []
    fetch = client.fetch_range

    def fetch_range(*arguments: Any) -> Any:
        done.append("read")
        return fetch(*arguments)

    monkeypatch.setattr(client, "fetch_range", fetch_range)
    found = list(read_rows(client, spans, leaves, lambda: done.append("renewed")))

    assert done == ["renewed", "read"] * len(record.runs)
    for asked, one in zip(spans, found, strict=True):
        whole = fetch(namespace, one.run, one.run.rows * one.size)
        heads = leaves[one.layer].heads if one.run.layout == "HND" else 1
        first, end = asked.start - one.run.start, asked.end - one.run.start
        table = whole.reshape(heads, one.run.rows, -1)[:, first:end]
        got = one.encoded(asked.start, asked.end, leaves[one.layer])
        assert np.array_equal(got, table.reshape(-1))


def _spans(start: int, end: int) -> list[tuple[int, int]]:
    """Three parts of a run, of one row at least."""
    middle = (start + end) // 2
    return [(start, start + 1), (start, max(middle, start + 1)), (end - 1, end)]
