"""What makes two prompts differ, and what can be done about it, in plain words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_THINKING = ("<think>", "</think>", "<thinking>", "</thinking>", "[THINK]", "<|channel|>analysis")
_DAYS = "mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_CLOCK = re.compile(
    rf"\d{{1,2}}:\d{{2}}|\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|\b(?:{_DAYS})[a-z]*\.?,?\s+\d|\d\s+(?:{_DAYS})[a-z]*\b",
    re.IGNORECASE,
)
_NONCE = re.compile(r"[0-9a-f]{8,}|[0-9a-f]{4,}(?:-[0-9a-f]{2,})+|(?=\w*\d)\w{10,}", re.IGNORECASE)
#: in the sentence about what the server of the store took away for limits of its own.
EVICTED = "server evicted it"
#: characters around the difference that still belong to it.
_NEAR = 24


@dataclass(frozen=True)
class Difference:
    """The text around the first token that differs, of both prompts; "" where one has ended."""

    before: str
    asked: str
    stored: str

    @staticmethod
    def of(told: Json) -> Difference | None:
        """The difference that an answer of ``/v1/pion/explain`` describes, if it does."""
        asked, stored = told.get("asked_text"), told.get("stored_text")
        if not isinstance(asked, dict) or not isinstance(stored, dict):
            return None
        return Difference(
            str(asked.get("before", "")),
            str(asked.get("token", "")) + str(asked.get("after", "")),
            str(stored.get("token", "")) + str(stored.get("after", "")),
        )

    def around(self, text: str) -> str:
        """The difference as ``text`` has it, with what lies close before it."""
        return self.before[-_NEAR:] + text[:_NEAR]


def causes(told: Json, body: Json | None = None) -> list[str]:
    """Why a prompt is not a longer hit and what helps, the likeliest first.

    ``told`` is the answer of ``/v1/pion/explain``, ``body`` the chat body that it is about.
    """
    if told.get("key_field"):
        return [_of_key(str(told["key_field"]), told.get("stored_key"), told.get("asked_key"))]
    if str(told.get("sentence") or "").startswith("no store:"):
        return []  # nothing was compared, and warming would need the store, too
    prompt, common = int(told.get("prompt_tokens") or 0), int(told.get("common") or 0)
    restorable = int(told.get("restorable") or 0)
    if prompt and restorable >= prompt - 1:
        return ["nothing is missing: all but the last token is reused"]
    if EVICTED in str(told.get("sentence") or ""):
        return [
            "the store's server had no room for the rest: give it more (--disk-budget), or pin "
            "what is to stay: pion-vllm-mlx conversations pin ID"
        ]
    if not common:
        return [
            "no request began like this one, or what it stored is gone; system prompts can be "
            "stored ahead: pion-vllm-mlx warm FILE --model M"
        ]
    found = []
    if restorable < common:
        found.append(_not_restorable(restorable, common, str(told.get("sentence") or "")))
    difference = Difference.of(told)
    if told.get("stored_token") is None:
        found.append("the stored prompt ends there: what is new in this one has to be computed")
    elif told.get("asked_token") is None:
        found.append("this prompt ends there, and the stored one goes on: nothing is lost by that")
    elif difference is not None:
        found.append(_of_text(difference, body))
    return found


def _not_restorable(restorable: int, common: int, sentence: str) -> str:
    told = f"of {common} tokens in common only {restorable} can be restored"
    return told + next((f": {why}" for word, why in _LACKING if word in sentence), "")


#: what a sentence says is not there, and why that keeps tokens from being restored.
_LACKING = (
    (
        "recurrent state",
        "a model with a recurrent state continues only from points where one was kept (the end "
        "of system prompt and tools, the end of a prompt)",
    ),
    (
        "no window",
        "a layer with a sliding window continues only where the rows of a whole window are "
        "stored, which later turns have dropped",
    ),
    ("checkpoints are off", "PION_LINEAGE=0 leaves only whole prompts"),
    ("least gain", "fewer tokens than --pion-min-gain are neither kept nor restored"),
    ("--pion-min-gain", "fewer tokens than --pion-min-gain are neither kept nor restored"),
    ("evicted", "the budget had no room for the rest: --pion-budget-gb, or pin conversations"),
)


def _of_key(field: str, stored: Any, asked: Any) -> str:
    """A field of the key in words; both values where they are short."""
    told = _KEY_FIELDS.get(re.split(r"[.\[]", field)[0], "the model is another one")
    whose = field == "tenant"  # is told to nobody
    values = "" if whose else f" (stored: {_short(stored)}, asked: {_short(asked)})"
    return f"key field {field} differs{values}: {told}"


_KEY_FIELDS = {
    "weights": "other weights: another model, another quantization of it, or an adapter",
    "args": "the model's configuration is another one (config.json)",
    "structure": "the model is built otherwise: another model, or an adapter",
    "dtypes": "the weights have another dtype",
    "code": "another version of mlx-lm computes this model: its K/V may differ; after an "
    "upgrade everything is computed once more",
    "functions": "other code runs: functions replaced at run time, or another class of layers",
    "mlx": "another version of mlx: its numbers may differ",
    "cache": "the model's caches are of other classes or sizes (for example --max-kv-size)",
    "format": "another storage format: give both the same --pion-vquant",
    "kv": "other quantized caches: give both the same --kv-bits and --kv-group-size",
    "tenant": "another API key: two keys never share prefixes",
    "draft": "another draft model",
    "adapter": "another adapter",
}


def _of_text(difference: Difference, body: Json | None) -> str:
    """What the text at the first difference looks like."""
    told = next((words for looks_like, words in _KINDS if looks_like(difference)), _TEXT)
    place = _place(difference, body)
    return f"{place}{told}" if place else told


_TEXT = "the text differs there; everything before it is reused, nothing behind it can be"


def _is_thinking(difference: Difference) -> bool:
    asked, stored = difference.asked, difference.stored
    near = [any(mark in text[:_NEAR] for mark in _THINKING) for text in (asked, stored)]
    return near[0] != near[1]


def _is_clock(difference: Difference) -> bool:
    asked, stored = map(difference.around, (difference.asked, difference.stored))
    return _covers(_CLOCK, asked, difference) and _covers(_CLOCK, stored, difference)


def _is_nonce(difference: Difference) -> bool:
    asked, stored = map(difference.around, (difference.asked, difference.stored))
    return _covers(_NONCE, asked, difference) and _covers(_NONCE, stored, difference)


def _covers(pattern: re.Pattern[str], text: str, difference: Difference) -> bool:
    """Whether a match reaches the place of the difference, or lies just at it."""
    at = min(len(difference.before), _NEAR)
    return any(one.start() <= at + 2 and one.end() >= at - 2 for one in pattern.finditer(text))


def _is_space(difference: Difference) -> bool:
    """Whether both texts go on alike, as far as they are known, but for white space."""
    asked, stored = difference.asked, difference.stored
    shown = min(len(asked), len(stored))
    if asked[:shown] == stored[:shown]:
        return False
    words, others = ("".join(text.split()) for text in (asked, stored))
    known = min(len(words), len(others))
    return words[:known] == others[:known] if known else words == others


_KINDS: tuple[tuple[Callable[[Difference], bool], str], ...] = (
    (
        _is_thinking,
        "a thinking block is in one of them only: the chat template drops the thinking of "
        "earlier turns, so the reply is computed again once, and what comes before it is reused; "
        "a template option that keeps it (--chat-template-args) avoids that",
    ),
    (
        _is_clock,
        "a clock or date: it changes with every request, and nothing behind it can be reused; "
        "move it to the end of the prompt, or into the user's message, or make it coarser",
    ),
    (
        _is_nonce,
        "a nonce (a session or request id): nothing behind it can be reused; take it out of the "
        "prompt, or move it to the end",
    ),
    (
        _is_space,
        "white space only: two clients, or two ways to join texts, write it differently",
    ),
)


def _place(difference: Difference, body: Json | None) -> str:
    """In which part of a request the difference lies, where that is plain; with a colon."""
    text = difference.before[-_NEAR:] + difference.asked[:_NEAR]
    if body is None or len(text) < _NEAR // 2:
        return ""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and text in _text_of(message.get("content")):
            part = "system prompt" if message.get("role") == "system" else "messages"
            return f"in the {part}: "
    tools = body.get("tools")
    if tools and text in json.dumps(tools, ensure_ascii=False):
        return "in the tools (their number, order and texts have to stay the same): "
    return ""


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        return "\n".join(map(str, parts))
    return str(content or "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
