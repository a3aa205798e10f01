"""A chat conversation put together turn by turn, for the APIs whose turns are shaped otherwise.

Neighbouring user texts become one message, and so do an assistant's text and the calls that
follow it: templates expect turns to alternate, and the model wrote them as one.  System
messages that open a conversation are one too.
"""

from __future__ import annotations

from pion_vllm_mlx.serve.checks import Json

PARAGRAPH = "\n\n"


class Conversation:
    """Collects chat messages; nothing that was added is changed but by what joins it."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def system(self, text: str) -> None:
        """A system text, joined to the one before; an empty text is none."""
        self._say("system", text)

    def user(self, text: str) -> None:
        """A user's text."""
        self._say("user", text)

    def assistant(self, text: str) -> None:
        """What the model said; after calls of its own it is a turn of its own."""
        last = self._last("assistant")
        if last is not None and "tool_calls" in last:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self._say("assistant", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A function call of the model's, in the turn in which it speaks."""
        last = self._last("assistant")
        if last is None:
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        function = {"name": name, "arguments": arguments}
        entry = {"id": call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(entry)

    def result(self, call_id: str, text: str) -> None:
        """What a call returned."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _last(self, role: str) -> Json | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == role else None

    def _say(self, role: str, text: str) -> None:
        last = self._last(role)
        if last is None:
            self.messages.append({"role": role, "content": text})
        elif text:
            said = last["content"]
            last["content"] = f"{said}{PARAGRAPH}{text}" if said else text
