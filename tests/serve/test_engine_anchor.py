"""Where a system prompt ends, whatever a chat template makes of it: the next chat starts there."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.tokenizer_utils import load as load_tokenizer

from pion_vllm_mlx.serve.engine_mlx_lm_anchor import Anchors
from tests.conftest import RunningServer
from tests.serve.engines import running_engine
from tests.serve.served import store_of
from tests.serve.tiny_folder import FOLDING, make_folder, write_tokenizer
from tests.tools.commands import command

SYSTEM = "You are a careful helper who answers in one sentence. " * 6
SLACK = 2
#: as FOLDING, but for the system prompt, which comes behind the turns.
LAST = FOLDING.replace("loop.first", "loop.last")
OPENING = len("<|im_start|>user\n") - len("<|im_start|>") + 1  # the marker is one token


def chat(text: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate((text, *turns))]
    return [{"role": "system", "content": SYSTEM}, *said]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_a_system_prompt_in_the_first_user_s_turn_is_computed_once(
    pion_server: RunningServer, tmp_path: Path, family: str
) -> None:
    model = make_folder(tmp_path / family, family, template=FOLDING)
    shared = OPENING + len(SYSTEM) + len("\n\n")
    store = store_of(pion_server)
    with running_engine(tmp_path, model, *store) as engine:
        replies = [engine.chat(chat(f"{name} asks: " + "why? " * 60), 1) for name in "ABC"]
        assert [reply.cached for reply in replies] == [0, shared - SLACK, shared - SLACK], [
            reply.receipt["why"] for reply in replies
        ]
        engine.until_stored()
        engine.restart()
        # windows that are in the store can be cut at every token
        assert engine.chat(chat("Dora asks."), 1).cached >= shared - SLACK


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5"])
def test_warm_stores_a_system_prompt_that_is_put_into_the_first_user_s_turn(
    pion_server: RunningServer, tmp_path: Path, family: str
) -> None:
    model = make_folder(tmp_path / family, family, template=FOLDING)
    text = tmp_path / "system.txt"
    text.write_text(SYSTEM)
    store = store_of(pion_server)
    (warmed,) = command("warm", text, "--model", model, "--json", *store).json
    assert warmed["computed"] == warmed["tokens"] == OPENING + len(SYSTEM)
    with running_engine(tmp_path, model, *store) as engine:
        reply = engine.chat(chat("What is a prefix?"), 1)
        assert reply.cached == warmed["tokens"], reply.receipt


def test_a_system_prompt_behind_the_turns_is_no_beginning(
    pion_server: RunningServer, tmp_path: Path
) -> None:
    """What two chats of one turn share is all that the next one can start from."""
    model = make_folder(tmp_path / "model", "gemma3_text", template=LAST)
    with running_engine(tmp_path, model, *store_of(pion_server)) as engine:
        for name, cached in (("Ada", 0), ("Bob", OPENING - SLACK)):
            reply = engine.chat(chat(f"{name} asks.", "So.", "Why? " * 60), 1)
            assert reply.cached == cached, reply.receipt


def test_a_template_that_says_the_date_is_asked_again_on_the_next_day(tmp_path: Path) -> None:
    day = "{{ '<|im_start|>' }}Today: Monday." + FOLDING
    write_tokenizer(tmp_path, day)
    tokenizer, days = load_tokenizer(tmp_path), [date(2026, 11, 30)]
    anchors = Anchors(lambda: days[-1])
    for text in (day, day.replace("Monday", "Tuesday")):
        tokenizer.chat_template = text
        for name in "AB":
            messages = chat(f"{name} asks.")
            request = SimpleNamespace(request_type="chat", messages=messages, tools=None)
            prompt = tokenizer.apply_chat_template(messages, tokenize=True)
            begins = tokenizer.decode(prompt).index(f"{name} asks.")
            said = len(tokenizer.encode(tokenizer.decode(prompt)[:begins]))
            assert anchors.length(tokenizer, request, {}, prompt) == said - SLACK
        days.append(date(2026, 12, 1))
