"""Where the system prompt and the tools of a chat end, in tokens.

vllm-mlx renders a chat to text and passes the text on.  Beside it the leading system messages
and the tools are rendered once more with another user message behind them; the tokens that both
texts share, less two, are the anchor: any other conversation under the same system prompt can
start there.  Once more with another system prompt gives where agents with the same tools part.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from pion_vllm_mlx.cache.leading_system import OTHER_SYSTEM, OTHER_USER, leading_system
from pion_vllm_mlx.cache.lineage import anchor_length
from pion_vllm_mlx.cache.vllm_mlx_backend_seams import CHAT_TEMPLATE, Replacements

MAX_TEXTS = 256


class AnchorTexts:
    """The system part of each rendered chat, remembered until its request comes."""

    def __init__(self) -> None:
        self.wanted = False
        self._system: OrderedDict[str, str] = OrderedDict()
        self._tools: OrderedDict[str, str] = OrderedDict()
        self._tokens: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, prompt: str, system: str, tools: str | None = None) -> None:
        """Note that ``prompt`` begins like ``system``, another chat's text.

        ``tools`` is that of a chat with the same tools and another system prompt.
        """
        with self._lock:
            _put(self._system, prompt, system)
            if tools is not None:
                _put(self._tools, prompt, tools)

    def ahead(self, prompt: str, tokenizer: Any) -> None:
        """Has what a prompt is compared with tokenized before it is: not by who generates."""
        for texts in (self._system, self._tools):
            with self._lock:
                text = texts.get(prompt)
            if text is not None:
                self._tokens_of(text, tokenizer)

    def length(self, prompt: str, ids: Sequence[int], tokenizer: Any) -> int | None:
        """The anchor of a prompt; None where it has no system part."""
        return self._shared(self._system, prompt, ids, tokenizer) or None

    def tools_length(self, prompt: str, ids: Sequence[int], tokenizer: Any) -> int:
        """As far as a prompt agrees with one of the same tools and another system prompt.

        More than its first words only where the template puts tools before the system prompt.
        """
        return self._shared(self._tools, prompt, ids, tokenizer)

    def _shared(
        self, texts: OrderedDict[str, str], prompt: str, ids: Sequence[int], tokenizer: Any
    ) -> int:
        with self._lock:
            text = texts.get(prompt)
        return anchor_length(self._tokens_of(text, tokenizer), ids) if text is not None else 0

    def _tokens_of(self, text: str, tokenizer: Any) -> list[int]:
        with self._lock:
            known = self._tokens.get(text)
        if known is None:
            known = [int(token) for token in tokenizer.encode(text)]
            with self._lock:
                _put(self._tokens, text, known)
        return known


def patch_chat_template(replacements: Replacements, anchors: AnchorTexts) -> None:
    """Have every rendered chat's system part remembered, and a template's refusal be a 400."""
    from fastapi import HTTPException
    from jinja2 import TemplateError

    original: Callable[..., str] = vars(CHAT_TEMPLATE.owner())[CHAT_TEMPLATE.name]

    @functools.wraps(original)
    def apply(self: Any, messages: list[dict[str, Any]], *args: Any, **options: Any) -> str:
        try:
            prompt = original(self, messages, *args, **options)
        except (TemplateError, ArithmeticError, TypeError) as error:
            refused = str(error) or type(error).__name__
            raise HTTPException(400, f"the chat template refuses this: {refused}") from error
        leading = leading_system(messages)
        tools = args[0] if args else options.get("tools")
        if anchors.wanted and len(leading) < len(messages) and (leading or tools):
            try:
                system = original(self, [*leading, OTHER_USER], *args, **options)
                other = [OTHER_SYSTEM, OTHER_USER] if leading and tools else None
                shared = original(self, other, *args, **options) if other else None
            except (TemplateError, ValueError, TypeError, KeyError):
                return prompt  # a template that refuses such a chat: no anchor
            anchors.remember(prompt, system, shared)
        return prompt

    replacements.replace(CHAT_TEMPLATE, apply)


def _put(table: OrderedDict[str, Any], key: str, value: Any) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > MAX_TEXTS:
        table.popitem(last=False)
