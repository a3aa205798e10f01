"""The manual of the commands, written from their table: ``docs/commands.md``.

``python -m pion_vllm_mlx.server.command_docs docs/commands.md`` writes it (``make docs``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pion_vllm_mlx.server import commands as commands  # fills the command table
from pion_vllm_mlx.server.command import TABLE, Command

_HEAD = """# Commands

Written from the command table by `make docs`; a test compares the two. `COMMAND DOCS` answers
the same.

lower case is a value, UPPER CASE a word that is written so, `[ ]` may be left out, `( )` belongs
together, `a|b` is one of the two, `x...` once or more often.

| mark | meaning |
|---|---|
| write | logged before it is answered |
| kvcache | only with `--kvcache` |
| extension | not part of the protocol that other servers speak; before words: these words only |
| tenant | a tenant may use it, on its own names; every other command is refused to tenants |
| no auth | allowed before AUTH |
"""

_TITLES = {
    "connection": "Connection and server",
    "keyspace": "Keys: a subset of Redis",
    "PION": "Value receipt",
}


def manual(entries: Iterable[Command]) -> str:
    """The whole text: a section a group, a table row a command."""
    groups: dict[str, list[Command]] = {}
    for entry in sorted(entries, key=lambda entry: entry.name):
        groups.setdefault(entry.group, []).append(entry)
    sections = [_section(name, groups[name]) for name in sorted(groups, key=_order)]
    return "\n".join([_HEAD, *sections])


def _order(group: str) -> tuple[bool, str]:
    """What the server is for comes first, plain keys and the connection last."""
    return group in ("connection", "keyspace"), group.lower()


def _section(group: str, entries: Sequence[Command]) -> str:
    lines = [f"## {_TITLES.get(group, group + '.*')}", "", "| command | what it does | marks |"]
    lines.append("|---|---|---|")
    for entry in entries:
        words = f"{entry.name} {entry.syntax}".strip().replace("|", "\\|")
        lines.append(f"| `{words}` | {entry.summary} | {_marks(entry)} |")
    return "\n".join([*lines, ""])


def _marks(entry: Command) -> str:
    flags = {
        "write": entry.write,
        "kvcache": entry.kvcache,
        "extension": entry.extension,
        "tenant": entry.tenant,
        "no auth": entry.no_auth,
    }
    words = f"extension {' '.join(entry.extensions)}"
    flags[words] = bool(entry.extensions)
    return ", ".join([*(name for name, is_so in flags.items() if is_so), f"since {entry.since}"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(manual(TABLE.values()), encoding="utf-8")
