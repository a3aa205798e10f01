"""What a model thinks is counted as that in ``usage``, in every API that has a word for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.front import running_front
from tests.serve.tiny_folder import make_folder

THOUGHT, SAID = "This wants a look. ", "I look."
USER = [{"role": "user", "content": "How is the weather there?"}]


def prove_thoughts_are_counted(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    *words: str,
    parser: tuple[str, ...] = (),
) -> None:
    """Asks a serve over an engine whose model thinks, and one whose model does not.

    ``parser``: the flags with which an engine knows thoughts, if it has to be told.
    """
    model = make_folder(folder / "model")
    says = {f"<think>{THOUGHT}</think>{SAID}": len(THOUGHT), SAID: 0}
    for number, (text, thought) in enumerate(says.items()):
        for name, value in (("MODEL", str(model)), ("SAYS", text), ("ENGINE", engine)):
            monkeypatch.setenv(f"PION_TEST_{name}", value)
        place = folder / str(number)
        place.mkdir()
        flags = ("--model", str(model), "--no-pion", *words, *(parser if thought else ()))
        with (
            running_front(place, *flags, engine="tests.serve.steered") as front,
            openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as gpt,
        ):
            _asked(gpt, thought)


def _asked(gpt: openai.OpenAI, thought: int) -> None:
    given: dict[str, Any] = {"model": "m", "input": "How is it?", "max_output_tokens": 200}
    told = gpt.responses.create(**given)
    with gpt.responses.stream(**given) as events:
        for _ in events:
            pass
        streamed = events.get_final_response()
    for response in (told, streamed):
        kinds = [item.type for item in response.output]
        assert kinds == [*["reasoning"] * bool(thought), "message"]
        assert response.usage is not None
        counted = response.usage.output_tokens_details.reasoning_tokens
        assert _is_counted(counted, thought)
        assert counted + len(SAID) <= response.usage.output_tokens
    asked: dict[str, Any] = {"model": "m", "messages": USER, "max_tokens": 200}
    whole = gpt.chat.completions.create(**asked).usage
    options = {"include_usage": True}
    chunks = gpt.chat.completions.create(stream=True, stream_options=options, **asked)
    for usage in (whole, [chunk.usage for chunk in chunks if chunk.usage][-1]):
        details = usage.completion_tokens_details
        assert (details is not None) == bool(thought)
        assert details is None or _is_counted(details.reasoning_tokens, thought)


def _is_counted(counted: int, thought: int) -> bool:
    """A token a letter; the two markers around them may count, too."""
    return thought <= counted <= thought + 2 * bool(thought)
