"""The small real model behind mlx-lm's engine: what is reused is not computed.

Not part of the ordinary run: ``pytest --long``, with the demo's extra installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import running_server
from tests.real_model import LENGTHS, alone, load_real, real_folder, same_tokens, text_of
from tests.serve.engines import Engine, Reply, running_engine

LIMIT = 12
MORE = " And then the boats came back."


@dataclass
class Served:
    """An engine on the real model, and the model by itself."""

    engine: Engine
    model: Any
    tokenizer: Any

    def complete(self, text: str) -> Reply:
        """A completion, proved against mlx-lm alone."""
        reply = self.engine.complete(text, LIMIT)
        ids = list(self.tokenizer.encode(text))
        same_tokens(reply.tokens, alone(self.model, self.tokenizer, ids, LIMIT))
        assert reply.prompt == len(ids)
        assert reply.forward == reply.prompt - reply.cached + reply.usage["completion_tokens"]
        return reply


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    folder = real_folder(request.config)
    place: Path = tmp_path_factory.mktemp("real")
    with running_server(place / "data") as server:
        store = ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))
        with running_engine(place, folder, *store) as engine:
            yield Served(engine, *load_real(folder))


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_after_a_kill_and_the_next_turn_compute_only_what_is_new(
    served: Served, length: int
) -> None:
    text, engine = text_of(served.tokenizer, length), served.engine
    assert served.complete(text).cached < 16
    engine.until_stored()
    engine.restart()
    again = served.complete(text)
    assert again.cached == again.prompt - 1 == length - 1
    longer = served.complete(text + MORE)
    assert longer.cached >= length - 1
