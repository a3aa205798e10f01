"""Chats with images bypass the store, and every place that tells what was reused says so."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

from tests.serve.front import Front, running_front, until  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SHOWN = "{% for part in message.content %}{{ part.text or '<think>' }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder whose chat template shows where an image is."""
    if not hasattr(importlib.import_module("mlx_lm.server"), "load_processor"):
        pytest.skip("this mlx-lm reads no images")
    folder = make_folder(tmp_path / "model", "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    plain = "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    assert plain in settings["chat_template"]
    spoken = "{% if message.content is string %}" + plain + "{% else %}"
    spoken += "{{ '<|im_start|>' + message.role + '\\n' }}" + SHOWN + "{% endif %}"
    settings["chat_template"] = settings["chat_template"].replace(plain, spoken)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def asked(stream: bool) -> dict[str, Any]:
    text = {"type": "text", "text": "what is on this picture, and what is it not? " * 4}
    messages = [{"role": "user", "content": [text, IMAGE]}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, "stream": stream}


def stored(front: Front) -> int:
    """How many segments the store has been given."""
    return int(front.request("/v1/pion/stats")[1].get("kept", 0))


def test_a_chat_with_an_image_says_that_it_is_not_stored(tmp_path: Path, model: Path) -> None:
    engine = "tests.serve.seeing_engine"
    with running_front(tmp_path, "--model", str(model), engine=engine) as front:
        status, first = front.request(CHAT, asked(False))
        assert (status, first["pion"]["why"]) == (200, "images are not stored")
        assert (first["pion"]["tier"], first["pion"]["reused_tokens"]) == ("none", 0)
        assert first["pion"]["prompt_tokens"] == first["usage"]["prompt_tokens"] > 100
        until(lambda: 'why="images are not stored"' in front.output(), "the reason in the log")
        again = front.request(CHAT, asked(False))[1]
        reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (again["pion"]["tier"], again["pion"]["reused_tokens"]) == ("memory", reused)
        assert again["pion"]["why"] == "images are not stored" and reused > 100
        assert "images are not stored" in front.request(CHAT, asked(True))[1]["text"]
        assert not stored(front)
        text = {"messages": [{"role": "user", "content": "and in words alone? " * 8}]}
        told = front.request(CHAT, {**text, "max_tokens": 2})[1]["pion"]["why"]
        assert "images" not in told
        until(lambda: stored(front), "text is stored")
