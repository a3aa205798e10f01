"""The trace of a coding agent: what is asked, in which order, and what goes on side by side.

A request is a body of Anthropic Messages.  A *lane* is a list of requests of which each waits
for the one before; the lanes of a *phase* run side by side, phases one after the other.

=================  =========================================================================
main conversation  system prompt and tools, then turns: a word of the agent, a tool call, its
                   result.  Its newest user message ends in a line with the time, which the
                   next request no longer has there.
three sub-agents   side by side, half-way through: a system prompt of their own, the same
                   tools, a task each.  Their line with the time stays where it was written.
edit               a tool's result in the middle of the history is shortened, for good.
regenerate         the last request once more.
billing header     in every system prompt, another nonce in each request.
restart            of the server, before the phase that says so.
=================  =========================================================================

All text is made up from a few words with a fixed seed: the same size gives the same trace.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Json = dict[str, Any]

HEADER = "x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; nonce={nonce:032x}"
SUB_AGENTS = 3
_WORDS = (
    "the", "cache", "prefix", "reads", "token", "row", "store", "of", "a", "file", "and",
    "turn", "model", "keeps", "server", "when", "segment", "is", "asked", "twice", "branch",
    "before", "agent", "test", "fails", "because", "window", "state", "was", "moved", "to",
    "block", "hash", "with", "every", "index", "page", "log", "restart", "after", "tree",
    "line", "call", "result", "names", "its", "bytes", "on", "disk", "never", "again",
)  # fmt: skip
_TOOLS = (
    "read_file", "write_file", "edit_file", "list_folder", "search_text", "run_command",
    "run_tests", "fetch_page", "make_plan", "start_agent", "ask_user", "show_diff",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How long a trace is; ``_tokens`` in tokens of one character each.

    ``turns`` are requests of the main conversation, without the regenerated one; ``sub_turns``
    those of each sub-agent.
    """

    tools_tokens: int = 6_500
    system_tokens: int = 3_500
    sub_system_tokens: int = 1_200
    turns: int = 20
    sub_turns: int = 4
    result_tokens: int = 420
    reply_tokens: int = 8
    restarts: bool = True

    @property
    def sub_agents_after(self) -> int:
        """After so many turns of the main conversation its sub-agents begin."""
        return max(1, self.turns * 2 // 5)

    @property
    def edited_at(self) -> int:
        """The first turn whose history is edited."""
        return self.turns * 3 // 5

    @property
    def restart_before(self) -> int:
        """The first turn after the restart."""
        return self.turns * 7 // 10


SHORT = Size(3_000, 1_000, 400, turns=8, sub_turns=2, result_tokens=300, restarts=True)


@dataclass(frozen=True)
class Request:
    """One request: what it is called in results, and its body."""

    name: str
    body: Json = field(repr=False)


Lane = Sequence[Request]


@dataclass(frozen=True)
class Phase:
    """Lanes that run side by side; ``restart``: the server is started anew before."""

    lanes: Sequence[Lane]
    restart: bool = False


class Writer:
    """Makes up text; the same seed, the same text."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, below: int) -> int:
        """0 <= number < ``below``."""
        return int(self._random.random() * below)

    def text(self, characters: int) -> str:
        """Sentences of exactly so many characters."""
        words: list[str] = []
        length = 0
        while length < characters:
            word = _WORDS[self.number(len(_WORDS))]
            word += (".\n" if self.number(4) == 0 else ".") if self.number(9) == 0 else ""
            words.append(word)
            length += len(word) + 1
        return " ".join(words)[:characters].replace("\n ", "\n").ljust(characters, ".")

    def about(self, characters: int) -> str:
        """Text of half to one and a half times so many characters."""
        return self.text(characters // 2 + self.number(characters))


@dataclass
class Conversation:
    """A conversation that grows: its system prompt, tools and messages so far.

    ``clock_stays``: the line with the time stays in the message for which it was written.
    """

    name: str
    system: str
    tools: list[Json]
    limit: int
    clock_stays: bool
    writer: Writer
    messages: list[Json] = field(default_factory=list)
    asked: int = 0

    def says(self, *blocks: Json) -> None:
        """The user's side: texts, or results of tools."""
        self.messages.append({"role": "user", "content": list(blocks)})

    def answers(self, text: str, tool: str, given: Json) -> str:
        """The agent's turn: a word and one call; the id of the call."""
        call_id = f"toolu_{self.name}_{len(self.messages):04d}"
        call = {"type": "tool_use", "id": call_id, "name": tool, "input": given}
        self.messages.append({"role": "assistant", "content": [text_block(text), call]})
        return call_id

    def request(self, what: str) -> Request:
        """The request for what the agent says next, with header and clock of its own."""
        self.asked += 1
        clock = text_block(self._clock())
        last = self.messages[-1]
        with_clock = {**last, "content": [*last["content"], clock]}
        if self.clock_stays:
            self.messages[-1] = last = with_clock
        nonce = HEADER.format(n=self.asked, nonce=self.writer.number(1 << 60))
        body = {
            "model": "default_model",
            "max_tokens": self.limit,
            "temperature": 0,
            "stream": True,
            "system": [text_block(nonce), text_block(self.system)],
            "tools": self.tools,
            "messages": [*self.messages[:-1], with_clock],
        }
        return Request(f"{self.name} {what}", json.loads(json.dumps(body)))

    def _clock(self) -> str:
        seconds = self.asked * 37 + self.writer.number(30)
        return f"It is now 10:{seconds // 60 % 60:02d}:{seconds % 60:02d} on day {self.asked}."


def text_block(text: str) -> Json:
    """A block of text."""
    return {"type": "text", "text": text}


def tool_list(characters: int, writer: Writer) -> list[Json]:
    """Tools whose descriptions and schemas take about so many characters in all."""
    each = characters // len(_TOOLS)
    return [_tool(name, each, writer) for name in _TOOLS]


def _tool(name: str, characters: int, writer: Writer) -> Json:
    schema: Json = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": writer.text(40)},
            "count": {"type": "integer", "minimum": 0},
        },
        "required": ["path"],
    }
    taken = len(json.dumps(schema)) + len(name) + 90
    described = writer.text(max(16, characters - taken))
    return {"name": name, "description": described, "input_schema": schema}


def make_trace(size: Size, seed: int = 11) -> list[Phase]:
    """The phases of the whole trace."""
    writer = Writer(seed)
    tools = tool_list(size.tools_tokens, writer)
    system = "You are an agent that writes code.\n" + writer.text(size.system_tokens)
    main = Conversation("main", system, tools, size.reply_tokens, False, writer)
    main.says(text_block(writer.about(300)))
    phases: list[Phase] = []
    lane: list[Request] = []
    restart = False
    for turn in range(1, size.turns + 1):
        if turn == size.restart_before and size.restarts:
            phases.append(Phase([lane], restart))
            lane, restart = [], True
        if turn == size.edited_at:
            _shorten(main.messages, len(main.messages) // 2)
        lane.append(main.request(f"turn {turn}"))
        if turn == size.sub_agents_after:
            phases.append(Phase([lane], restart))
            phases.append(Phase(_sub_agents(size, tools, writer)))
            lane, restart = [], False
        _one_call(main, size)
    last = lane[-1]
    lane.append(replace(last, name="main regenerate", body=_with_other_nonce(last.body, writer)))
    phases.append(Phase([lane], restart))
    return phases


def _sub_agents(size: Size, tools: list[Json], writer: Writer) -> list[Lane]:
    system = "You look into one thing and report.\n" + writer.text(size.sub_system_tokens)
    lanes: list[Lane] = []
    for number in range(1, SUB_AGENTS + 1):
        own = Conversation(f"sub-agent {number}", system, tools, size.reply_tokens, True, writer)
        own.says(text_block(f"Task {writer.number(10**6)}: {writer.about(400)}"))
        lane = []
        for turn in range(1, size.sub_turns + 1):
            lane.append(own.request(f"turn {turn}"))
            _one_call(own, size)
        lanes.append(lane)
    return lanes


def _one_call(conversation: Conversation, size: Size) -> None:
    """The agent calls a tool, and gets its result."""
    writer = conversation.writer
    tool = _TOOLS[writer.number(len(_TOOLS))]
    given = {"path": f"src/{writer.text(12).strip()}.py", "count": writer.number(100)}
    call_id = conversation.answers(writer.about(90), tool, given)
    result = writer.about(size.result_tokens)
    conversation.says({"type": "tool_result", "tool_use_id": call_id, "content": result})


def _shorten(messages: list[Json], middle: int) -> None:
    """Replaces the first tool result from ``middle`` on by a note that it was cleared."""
    for index in range(middle, len(messages)):
        block = messages[index]["content"][0]
        if block["type"] == "tool_result":
            cleared = {**block, "content": "[Old result cleared]"}
            messages[index] = {**messages[index], "content": [cleared]}
            return


def _with_other_nonce(body: Json, writer: Writer) -> Json:
    nonce = HEADER.format(n=0, nonce=writer.number(1 << 60))
    return {**body, "system": [text_block(nonce), *body["system"][1:]]}


def count_requests(phases: Sequence[Phase]) -> int:
    """Requests of all lanes."""
    return sum(len(lane) for phase in phases for lane in phase.lanes)
