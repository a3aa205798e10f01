"""explain --request and --last: what differs, decoded, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("starlette")

from pion_vllm_mlx.cache.lineage.index import Gone, Segment
from pion_vllm_mlx.serve import options
from pion_vllm_mlx.serve.gate import tenant_of
from pion_vllm_mlx.tools.explain_advice import causes
from tests.serve.front import Front, running_front, until
from tests.serve.tiny_folder import make_folder
from tests.tools.commands import Ran, command, here

START = "You are a careful helper who answers in one sentence and never in two. "
END = " Nothing else is of any importance to anybody here."
KEY = "the key"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain")
    make_folder(folder / "model")
    make_folder(folder / "other", num_hidden_layers=1)
    return folder


@pytest.fixture(scope="module")
def serve(place: Path) -> Iterator[Front]:
    flags = ("--model", str(place / "model"), "--api-key", KEY)
    with running_front(place, *flags, engine=options.ENGINES["mlx-lm"].module) as front:
        yield front


def chat(system: str, said: str = "Hi", **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": said}]
    return {"messages": messages, "max_tokens": 1, **more}


def ask(front: Front, body: dict[str, Any]) -> None:
    """Have a request stored."""
    before = stats(front).get("written", 0)
    status, reply = front.request("/v1/chat/completions", body, {"x-api-key": KEY})
    assert status == 200, reply
    until(lambda: written(front, before), "the prompt in the store")


def stats(front: Front) -> dict[str, Any]:
    return front.request("/v1/pion/stats", headers={"x-api-key": KEY})[1]


def written(front: Front, before: int) -> bool:
    found = stats(front)
    return not found["waiting"] and found.get("written", 0) > before


def explained(place: Path, front: Front, body: Any, *words: object) -> Ran:
    file = place / "body.json"
    file.write_text(json.dumps(body))
    where = ("--port", front.port, "--api-key", KEY)
    return command("explain", "--request", file, *where, *words, data=place / "data")


def test_a_clock_in_the_system_prompt_is_named_with_its_place(place: Path, serve: Front) -> None:
    ask(serve, chat(f"{START}It is 2026-11-29 10:41.{END}"))
    body = chat(f"{START}It is 2026-11-29 10:57.{END}")
    told = explained(place, serve, body, "--json").json
    assert told["asked_text"]["token"] == "5" and told["stored_text"]["token"] == "4"
    assert told["asked_text"]["before"].endswith("29 10:")
    assert told["stored_text"]["after"].startswith("1.")
    (cause,) = told["causes"]
    assert cause.startswith("in the system prompt: a clock or date")
    shown = explained(place, serve, body).out
    assert "10:[4]1." in shown and "10:[5]7." in shown and "-> in the system prompt" in shown


def test_the_body_of_a_text_completion_is_explained_with_and_without_a_serve(
    place: Path, serve: Front
) -> None:
    before = stats(serve).get("written", 0)
    body = {"prompt": f"{START}One text.{END}", "max_tokens": 1}
    status, reply = serve.request("/v1/completions", body, {"x-api-key": KEY})
    assert status == 200, reply
    until(lambda: written(serve, before), "the prompt in the store")
    tokens = reply["usage"]["prompt_tokens"]
    asked = {"prompt": f"{START}One other text.{END}"}
    for words in ((), ("--port", 1, "--model", place / "model")):
        found = explained(place, serve, body, "--json", *words).json
        assert (found["prompt_tokens"], found["restorable"]) == (tokens, tokens - 1)
        found = explained(place, serve, asked, "--json", "--api", "completions", *words).json
        assert found["asked_text"]["before"].endswith("One ")
    assert "prompt must be a string" in explained(place, serve, {"prompt": 3}).err


def test_the_last_miss_is_explained_without_its_body(place: Path, serve: Front) -> None:
    ask(serve, chat(f"{START}Session 7f3a9c1e2b."))
    ask(serve, chat(f"{START}Session 0b44d2e9aa."))
    where = ("--port", serve.port, "--api-key", KEY)
    told = command("explain", "--last", "--json", *where).json
    # by now the last one is stored itself: it is compared with what there was before
    assert told["prompt_tokens"] > told["restorable"] >= len(START)
    assert (told["stored_text"]["token"], told["asked_text"]["token"]) == ("7", "0")
    (cause,) = told["causes"]
    assert "nothing is missing" not in cause
    body = {"system": f"{START}Session 5511aacc77.", "messages": [{"role": "user", "content": "H"}]}
    (cause,) = explained(place, serve, body, "--json").json["causes"]
    assert "a nonce" in cause


def test_a_thinking_block_that_history_drops_costs_what_follows_it_alone(
    place: Path, serve: Front
) -> None:
    def turns(said: str) -> dict[str, Any]:
        messages = chat(f"{START}Think first.{END}", "When do we go?")["messages"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
        return {"messages": messages, "max_tokens": 1}

    ask(serve, turns("<think>Because it is late.</think>Go home."))
    told = explained(place, serve, turns("Go home."), "--json").json
    assert told["common"] == told["restorable"] == told["position"]
    assert told["stored_text"]["token"] == "<think>"
    assert "a thinking block" in told["causes"][0]
    status, reply = serve.request("/v1/chat/completions", turns("Go home."), {"x-api-key": KEY})
    assert status == 200
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == told["common"]


def test_another_api_key_is_the_field_of_the_key_that_differs(place: Path, serve: Front) -> None:
    said = chat(f"{START}For one tenant only.")
    ask(serve, said)
    file = place / "tenant.json"
    file.write_text(json.dumps(said))
    nobody = ("--port", 1, "--model", place / "model")
    told = command("explain", "--request", file, *nobody, "--json", data=place / "data")
    found = json.loads(told.out)
    assert told.code == 1, told.err
    assert found["key_field"] == "tenant" and found["restorable"] == 0
    assert "another API key" in found["causes"][0]
    assert tenant_of(KEY) not in told.out
    mine = command(
        "explain", "--request", file, *nobody, "--api-key", KEY, "--json", data=place / "data"
    ).json
    assert mine["key_field"] is None and mine["restorable"] == mine["prompt_tokens"] - 1
    nobody = ("--port", 1, "--model", place / "other", "--api-key", KEY)
    told = command("explain", "--request", file, *nobody, data=place / "data")
    assert told.code == 1 and "key field" in told.out and "configuration" in told.out


def test_what_cannot_be_explained_is_refused_in_a_line(
    place: Path, serve: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / "good.json"
    file.write_text(json.dumps(chat(START)))
    wrong = place / "wrong.json"
    wrong.write_text("{")
    where = ("--port", serve.port)
    for words, code, says in (
        (("--request", file, "--port", 1), 1, "--model"),
        (("--last", "--port", 1), 1, "only a running one"),
        (("--request", file, *where), 1, "refuses"),
        (("--request", wrong, *where), 1, "not JSON"),
        (("--request", place / "none.json", *where), 1, "cannot be read"),
        (("--request", file, "--last"), 2, "not allowed"),
        (("--request", file, "--api", "soap"), 2, "invalid choice"),
        (("--request", file, "--kv-bits", 8), 2, "--model"),
        (("--request", file, "--port", 1, "--model", place / "none"), 1, "no such folder"),
        (("--last", "--port", 99999), 2, "a port is 1 to 65535"),
        ((), 2, "--request BODY.json | --last"),
    ):
        done = here(capsys, "explain", *words)
        assert (done.code, says in done.err) == (code, True), (words, done)


def told(asked: tuple[str, str, str], stored: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    names = ("before", "token", "after")
    return {
        "common": 50,
        "restorable": 50,
        "prompt_tokens": 100,
        "position": 50,
        "asked_token": 1,
        "stored_token": 2,
        "asked_text": dict(zip(names, asked, strict=True)),
        "stored_text": dict(zip(names, stored, strict=True)),
        **more,
    }


@pytest.mark.parametrize(
    ("asked", "stored", "says"),
    [
        (("It is 12:0", "7", " now"), ("It is 12:0", "0", " now"), "a clock"),
        (("Today: ", "Monday", ", 3 May"), ("Today: ", "Friday", ", 7 May"), "a clock"),
        (("id=8f3a", "9", "c1e2b"), ("id=8f3a", "0", "b77aa"), "a nonce"),
        (("Hello.", "Good", " day"), ("Hello.", "<think>", "So"), "a thinking block"),
        (("a b", " ", "c"), ("a b", "\n", " c"), "white space"),
        (("one sentence.", "\n\n", "Hi"), ("one sentence.", " ", "Hi there"), "white space"),
        (("a b", "\n", ""), ("a b", " ", ""), "white space"),
        (("one sentence.", " ", "It is 2"), ("one sentence.", "<|im_end|>", "\n"), "text differs"),
        (("one sentence.", "<|im_end|>", ""), ("one sentence.", " ", "It is 2"), "text differs"),
        (("one sentence.", " ", "It is"), ("one sentence.", "", ""), "text differs"),
        (("one sentence.", " ", "It is"), ("one sentence.", "\n", "He was"), "text differs"),
        (("You are ", "good", " here"), ("You are ", "bad", " here"), "the text differs"),
    ],
)
def test_kinds_of_differences_have_their_advice(
    asked: tuple[str, str, str], stored: tuple[str, str, str], says: str
) -> None:
    (cause,) = causes(told(asked, stored))
    assert says in cause


def test_what_is_not_a_difference_of_texts_is_said_too() -> None:
    texts = (("a", "b", "c"), ("a", "", ""))
    (cause,) = causes(told(*texts, stored_token=None))
    assert "ends there" in cause
    short, _ = causes(told(*texts, restorable=20, stored_token=None))
    assert "only 20 can be restored" in short
    (cause,) = causes({"common": 0, "restorable": 0, "prompt_tokens": 9})
    assert "warm" in cause
    (cause,) = causes(told(*texts, key_field="code.llama", stored_key="1", asked_key="2"))
    assert "another version of mlx-lm" in cause
    body = {"messages": [], "tools": [{"name": "look around", "description": "x"}]}
    (cause,) = causes(told(('"name": "look ', "around", '"'), ('"name": "look ', "up", '"')), body)
    assert cause.startswith("in the tools")


@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("no recurrent state is stored after that", "a recurrent state"),
        ("no window is stored for the tokens after that", "a sliding window"),
        ("only the beginning of a stored prompt fits, and checkpoints are off", "PION_LINEAGE"),
        ("20 tokens are fewer than the least gain of 100", "--pion-min-gain"),
        ("", ""),
    ],
)
def test_what_cannot_be_restored_has_the_reason_of_its_own_kind_of_layers(
    why: str, says: str
) -> None:
    kinds = ("a recurrent state", "a sliding window", "PION_LINEAGE", "--pion-min-gain")
    texts = (("a", "b", "c"), ("a", "x", "c"))
    short, _ = causes(told(*texts, restorable=20, sentence=f"token 50 is 1 there; {why}"))
    assert [kind for kind in kinds if kind in short] == [says] * bool(says), short


def test_without_a_store_no_advice_is_given_that_needs_one() -> None:
    told = {"common": 0, "restorable": 0, "prompt_tokens": 9, "sentence": "no store: it is down"}
    assert causes(told) == []
    assert "warm" in causes({**told, "sentence": ""})[0]


@pytest.mark.parametrize("common", [0, 100])
def test_what_the_stores_server_evicted_is_said_with_what_helps(common: int) -> None:
    sentence = Gone(Segment(2, 1, common, 500), "evicted", 300).sentence
    asked = {"common": common, "restorable": common, "prompt_tokens": 400, "sentence": sentence}
    (cause,) = causes(asked)
    assert "--disk-budget" in cause and "pin" in cause


def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    done = here(capsys, "explain", "--last", "--port", "99999")
    assert (done.code, "a port is" in done.err) == (2, True)
