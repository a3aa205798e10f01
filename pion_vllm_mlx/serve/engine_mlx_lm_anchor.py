"""Where the system prompt and the tools of a chat end, in tokens of mlx-lm's server."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

from jinja2 import TemplateError

from pion_vllm_mlx.cache.leading_system import (
    ANOTHER_USER,
    OTHER_SYSTEM,
    OTHER_USER,
    leading_system,
)
from pion_vllm_mlx.cache.lineage import anchor_length
from pion_vllm_mlx.cache.lineage.policy import common_prefix

MAX_TEXTS = 64
_REFUSALS = (TemplateError, ValueError, TypeError, LookupError, AttributeError)
"""What templates end in when a chat is not to their liking."""


class Anchors:
    """Anchors of chats; the system part of each distinct one is rendered once a day. Any thread.

    Templates may say the date. ``today``: a day's date, in local time as theirs.
    """

    def __init__(self, today: Callable[[], date] = date.today) -> None:
        self._today = today
        self._lock = threading.Lock()
        self._known: OrderedDict[str, list[int]] = OrderedDict()

    def length(
        self, tokenizer: Any, request: Any, settings: Mapping[str, Any], prompt: Sequence[int]
    ) -> int | None:
        """Where the anchor of ``prompt`` lies; None where the chat has no system part.

        ``settings`` are the chat template's own, as mlx-lm was given them.
        """
        if request.request_type != "chat" or not tokenizer.has_chat_template:
            return None
        leading = leading_system(request.messages)
        if not (leading or request.tools) or len(leading) == len(request.messages):
            return None
        known = self._of(tokenizer, leading, request.tools, settings)
        return anchor_length(known, prompt) or None

    def tools_length(
        self, tokenizer: Any, request: Any, settings: Mapping[str, Any], prompt: Sequence[int]
    ) -> int:
        """As far as ``prompt`` agrees with one of the same tools and another system prompt.

        More than its first words only where the template puts tools before the system prompt.
        """
        chat = request.request_type == "chat" and tokenizer.has_chat_template
        if not chat or not request.tools or not leading_system(request.messages):
            return 0
        known = self._of(tokenizer, [OTHER_SYSTEM], request.tools, settings)
        return anchor_length(known, prompt)

    def _of(
        self, tokenizer: Any, leading: list[Any], tools: Any, settings: Mapping[str, Any]
    ) -> list[int]:
        """The system part with ``leading`` and ``tools``, rendered or remembered."""
        what = [id(tokenizer), leading, tools, dict(settings), self._today()]
        key = json.dumps(what, default=str)
        with self._lock:
            known = self._known.pop(key, None)
        if known is None:
            known = _rendered(tokenizer, leading, tools, settings)
        with self._lock:
            self._known[key] = known
            if len(self._known) > MAX_TEXTS:
                self._known.popitem(last=False)
        return known


def _rendered(
    tokenizer: Any, leading: list[Any], tools: Any, settings: Mapping[str, Any]
) -> list[int]:
    """The system part through the template: what chats share that differ in their user's text.

    Alone it would be nothing where a template puts it into the first user's turn.
    """
    both: list[list[int]] = []
    for user in (OTHER_USER, ANOTHER_USER):
        try:
            tokens = tokenizer.apply_chat_template(
                [*leading, user],
                tools=tools,
                tokenize=True,
                add_generation_prompt=False,
                **settings,
            )
        except _REFUSALS:
            return []
        both.append(list(tokens))
    return both[0][: common_prefix(*both)]
