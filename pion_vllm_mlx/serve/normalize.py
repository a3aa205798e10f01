"""Per-session metadata in system prompts, removed before anything is keyed by them.

Only whole lines of a known header go; no other difference between two prompts is touched.
"""

from __future__ import annotations

import re
from typing import Any

METADATA_PREFIX = "x-anthropic-billing-header:"
_METADATA_LINE = re.compile(rf"^{re.escape(METADATA_PREFIX)}[^\n]*\n?", re.MULTILINE)


def strip_metadata(text: str) -> str:
    """``text`` without the lines that start with the billing header."""
    return _METADATA_LINE.sub("", text) if METADATA_PREFIX in text else text


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages whose system texts, plain or in parts, are without metadata."""
    return [
        {**message, "content": _content(message["content"])} if _is_system(message) else message
        for message in messages
    ]


def _is_system(message: dict[str, Any]) -> bool:
    return message.get("role") in ("system", "developer") and "content" in message


def _content(content: object) -> object:
    if isinstance(content, str):
        return strip_metadata(content)
    if isinstance(content, list):
        return [_part(part) for part in content]
    return content


def _part(part: object) -> object:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": strip_metadata(part["text"])}
    return part
