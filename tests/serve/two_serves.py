"""Two serves that are alive at the same time, over the embedded server that the first started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.serve.front import Front, running_front, until

Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "You answer in one word. " * 10}


def asked(front: Front, words: str) -> Json:
    """The answer to a chat, of which all is stored."""
    messages = [SYSTEM, {"role": "user", "content": f"{words} {'And why is that so? ' * 8}"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    status, answer = front.request("/v1/chat/completions", body)
    assert status == 200, answer
    until(lambda: stats(front)["waiting"] == 0, "all is written")
    return answer


def stats(front: Front) -> Json:
    return front.request("/v1/pion/stats")[1]


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def found(front: Front, words: str, first: Json) -> None:
    """That a serve reads of the store all that another has stored, and says the same."""
    restores = stats(front)["restores"]
    answer = asked(front, words)
    assert answer["choices"] == first["choices"]
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    assert answer["pion"]["tier"] in ("mapped", "stored")
    assert stats(front)["restores"] == restores + 1


def prove_sharing(folder: Path, engine: str, *flags: str) -> None:
    """Serves over ``engine`` share what they compute, the one that came first gone or not."""
    words = (*flags, "--pion-preload-gb", "0")
    with running_front(folder, *words, engine=engine) as second_to_end:
        with running_front(folder, *words, engine=engine) as first_to_end:
            one = asked(first_to_end, "One.")
            assert cached(one) == 0
            found(second_to_end, "One.", one)
            two = asked(second_to_end, "Two.")
            found(first_to_end, "Two.", two)
            assert first_to_end.stop() == 0
        three = asked(second_to_end, "Three.")
        with running_front(folder, *words, engine=engine) as later:
            for question, answer in (("Three.", three), ("One.", one)):
                found(later, question, answer)
            assert second_to_end.stop() == 0
            found(later, "Two.", two)
