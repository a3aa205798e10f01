"""A stop sequence ends a reply before it, whatever tokens it lies in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from pion_vllm_mlx.serve.engine_mlx_lm_replies import FollowedReply  # noqa: E402
from pion_vllm_mlx.serve.stops import Stops  # noqa: E402
from tests.serve.engines import Engine, running_engine  # noqa: E402

MARKER, MARKER_ID = "<|im_start|>", 1
END_ID = 0
CHAT = "/v1/chat/completions"


@dataclass
class Said:
    """A response of mlx-lm, as far as it is looked at."""

    text: str
    token: int
    finish_reason: str | None = None


class _Letters:
    """Decodes each token as one letter."""

    eos_token_ids = frozenset({END_ID})

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from tests.serve.tiny_folder import make_folder

    folder: Path = tmp_path_factory.mktemp("stops")
    make_folder(folder / "llama")
    with running_engine(folder, folder / "llama", "--no-pion") as running:
        yield running


@pytest.mark.parametrize("words", [["END"], ["aab", "ab"], ["aaa"], ["x", "xyz"], ["never"], []])
@pytest.mark.parametrize("text", ["aaaab aaEND", "xxyz", "ENENDEND", "aa", ""])
def test_however_a_text_comes_in_parts_it_ends_where_the_whole_does(
    text: str, words: list[str]
) -> None:
    ends = [text.index(word) for word in words if word in text]
    wanted = text[: min(ends)] if ends else text
    for size in range(1, len(text) + 2):
        stops, told = Stops(words), ""
        parts = [text[at : at + size] for at in range(0, len(text), size)] or [""]
        for number, part in enumerate(parts, 1):
            told += stops.feed(part, last=number == len(parts))
            assert wanted.startswith(told)
            if stops.word is not None:
                break
        assert told == stops.said == wanted
        assert (stops.word is not None) == bool(ends)



def followed(*said: Said) -> tuple[list[Said], FollowedReply]:
    reply = FollowedReply(["END"], None)
    return list(reply.follow(iter(said), _Letters())), reply


@pytest.mark.parametrize("last", [None, "length"])
def test_a_reply_ends_before_a_sequence_that_lies_within_its_tokens(last: str | None) -> None:
    rest = [] if last else [Said("more", 4), Said("", 5, "length")]
    told, reply = followed(Said("ab", 1), Said("cE", 2), Said("NDx", 3, last), *rest)
    assert [one.text for one in told] == ["ab", "c", ""]
    assert told[-1].finish_reason == "length" and reply.reason("length") == "stop"
    assert reply.stopped_by(_Letters()) == "END" and reply.thoughts.generated == 3


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Said("", END_ID, "stop"), "abcE"),  # the model has ended it: nothing more comes
        (Said("N", 3, "length"), "abcEN"),
        (Said("ND", ord("D"), "stop"), "abc"),  # mlx-lm has seen it
    ],
)
def test_what_might_have_become_a_sequence_is_written_where_it_did_not(
    end: Said, text: str
) -> None:
    told, reply = followed(Said("ab", ord("N")), Said("cE", ord("E")), end)
    written = [one.text for one in told if one.finish_reason != "stop"]
    assert "".join(written) == text and len(told) == 3
    assert told[-1].finish_reason == reply.reason(end.finish_reason) == end.finish_reason


def test_without_sequences_nothing_waits() -> None:
    reply, taken = FollowedReply([], None), []

    def responses() -> Iterator[Said]:
        for number in range(3):
            taken.append(number)
            yield Said("x", number)

    for number, _ in enumerate(reply.follow(responses(), _Letters())):
        assert taken == list(range(number + 1))


@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=["batched", "alone"])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_the_engine_stops_where_a_sequence_begins_and_ends_inside_of_tokens(
    engine: Engine, at: int, more: dict[str, Any]
) -> None:
    asked = {
        "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 12,
        "logit_bias": {str(MARKER_ID): 1000.0}, **more,
    }  # fmt: skip
    status, body = engine.request(CHAT, asked)
    assert status == 200, body
    whole = body["choices"][0]
    assert whole["message"]["content"] == 12 * MARKER and whole["finish_reason"] == "length"
    word = (2 * MARKER)[at : at + len(MARKER) - (at == 0)]
    status, body = engine.request(CHAT, {**asked, "stop": ["never said", word]})
    ended = body["choices"][0]
    assert status == 200 and (ended["finish_reason"], ended["stop_reason"]) == ("stop", word)
    assert (ended["message"].get("content") or "") == MARKER[:at]
    assert body["usage"]["completion_tokens"] == (1 if at == 0 else 2)
    same = engine.request(CHAT, {**asked, "stop": "never said"})[1]["choices"][0]
    assert same["message"] == whole["message"] and same["finish_reason"] == "length"
