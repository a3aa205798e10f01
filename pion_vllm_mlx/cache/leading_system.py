"""The system part of a chat, and stand-ins for what follows it or stands in its place.

An anchor lies where the tokens of two chats part that differ in such a stand-in alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OTHER_USER = {"role": "user", "content": "\u2042"}
ANOTHER_USER = {"role": "user", "content": "."}
OTHER_SYSTEM = {"role": "system", "content": "\u2042"}


def leading_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system messages before the first other one."""
    leading = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message)
    return leading
