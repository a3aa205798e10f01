"""Stop sequences end a reply of vllm-mlx before them, are told, and end its work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.serve.engine_vllm_mlx_stops import stop_words  # noqa: E402
from tests.serve.front import Front, running_front  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]
LIMIT = 60


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("stops")
    model = make_folder(folder / "model", "qwen3_next")
    words = ["--engine", "vllm-mlx", "--model", str(model), "--no-pion"]
    engine = "pion_vllm_mlx.serve.engine_vllm_mlx"
    with running_front(folder, *words, engine=engine) as running:
        yield running


def answer(front: Front, path: str, **asked: Any) -> Json:
    status, body = front.request(path, {"max_tokens": LIMIT, "temperature": 0, **asked})
    assert status == 200, body
    return body


def word_in(text: str) -> str | None:
    """A word from the middle of a reply that comes nowhere before, if there is one."""
    for at, size in itertools.product(range(2, len(text) - 4), (1, 2, 3)):
        word = text[at : at + size]
        if word.isascii() and word.isalnum() and text.find(word) == at:
            return word
    return None


def test_a_stop_sequence_ends_a_reply_before_it_and_is_told(front: Front) -> None:
    path = "/v1/chat/completions"
    for number in range(50):  # what a random model says
        asked = {"messages": [{"role": "user", "content": f"hello {number}"}]}
        whole = answer(front, path, **asked)["choices"][0]
        text = whole["message"]["content"]
        word = word_in(text)
        if word is not None:
            break
    else:
        raise AssertionError("no reply has a word of its own")
    stopped = answer(front, path, **asked, stop=["never said", word])
    choice = stopped["choices"][0]
    assert choice["message"]["content"] == text[: text.index(word)]
    assert choice["finish_reason"] == "stop"
    assert 0 < stopped["usage"]["completion_tokens"] < LIMIT
    other = answer(front, path, **asked, stop="never said")["choices"][0]
    assert other == whole
    body = answer(front, "/v1/messages", **asked, stop_sequences=[word])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", word)
    assert body["content"][0]["text"] == text[: text.index(word)]
    assert body["usage"]["output_tokens"] == stopped["usage"]["completion_tokens"]
    body = answer(front, "/v1/messages", **asked, stop_sequences=["never said"])
    assert body["stop_reason"] in ("end_turn", "max_tokens") and body["stop_sequence"] is None


def test_a_text_completion_stops_too(front: Front) -> None:
    text = answer(front, "/v1/completions", prompt="hello there")["choices"][0]["text"]
    body = answer(front, "/v1/completions", prompt="hello there", stop=text[-1])
    assert body["choices"][0]["text"] == text[: text.index(text[-1])]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_what_is_no_list_of_words_is_left_to_the_server() -> None:
    assert stop_words(b'{"stop": "a"}') == ["a"]
    assert stop_words(b'{"stop": ["a", 1, "b"]}') == ["a", "b"]
    for none in (b"", b"[]", b'{"stop": null}', b'{"stop": 5}', b'"stop"'):
        assert stop_words(none) == []
