"""One of two processes that store the same prompts at once: port, kind, seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore  # noqa: E402
from tests.cache.lineage.driving import KINDS, Engine, prompt, same_reply  # noqa: E402
from tests.models import tiny_model  # noqa: E402


def main(port: int, kind: str, seed: int) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    options = LineageOptions(url=f"tcp://127.0.0.1:{port}", key_parts={"run": kind})
    store = LineageStore(model, options)
    engine, plain = Engine(model, store, kv_bits), Engine(model, None, kv_bits)
    wrong = 0
    order = range(4) if seed == 0 else reversed(range(4))
    for which in [*order, *range(4)]:
        ids = [*prompt(80, 10), *prompt(40, 20 + which)]
        turn = engine.turn(ids, reply=1)
        try:
            same_reply(turn, plain.turn(ids, reply=1))
        except AssertionError:
            wrong += 1
        store.flush(60)
    stats = store.stats()
    store.close()
    report = {"wrong": wrong, "damaged": stats.get("damaged", 0)}
    print(json.dumps({**report, "bytes_rows": stats.get("bytes_rows", 0)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
