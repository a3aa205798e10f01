"""The page of the server's flags and limits: ``docs/server.md``, written from what is in force.

``python -m pion_vllm_mlx.server.option_docs docs/server.md`` writes it (``make docs``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from pion_vllm_mlx.server.commands.kv_prefix import MAX_FILE_NAME_BYTES, MAX_NAMESPACE_BYTES
from pion_vllm_mlx.server.keyspace.glob import MAX_PATTERN_BYTES
from pion_vllm_mlx.server.keyspace_command import MAX_STRING_BYTES
from pion_vllm_mlx.server.options import Option, options
from pion_vllm_mlx.server.outbound import MAX_REPLY_BYTES
from pion_vllm_mlx.server.session import ServerConfig
from pion_vllm_mlx.server.store.index import MAX_LAYER
from pion_vllm_mlx.server.store.reserve import RESERVE_BYTES
from pion_vllm_mlx.server.store.space import RESERVED_FREE_BYTES
from pion_vllm_mlx.server.transactions import MAX_QUEUED_BYTES, MAX_QUEUED_COMMANDS

_HEAD = """# Flags and limits of pion-server

Written from the server's own tables by `make docs`; a test compares the two. `pion-server --help`
prints the flags. `PION_REQUIREPASS` and `PION_EXPORT_DIR` say what `--requirepass` and the folder
of `V.EXPORT` are where no flag does. [access.md](access.md) is about passwords, TLS and tenants,
[workers.md](workers.md) about several workers, [commands.md](commands.md) about the commands.

BYTES is a number, or one with `k`, `mb`, `g` and so on: powers of 1024.

## Flags
"""


def manual() -> str:
    """The whole text."""
    known = options()
    lines = [_HEAD, "| flag | what it does |", "|---|---|"]
    lines += [_row(option) for option in known if option.help]
    silent = ", ".join(f"`{option.name}`" for option in known if not option.help)
    lines += [
        "",
        f"Accepted, so that command lines of other servers work, without effect: {silent}.",
    ]
    lines += ["", "## Limits", "", "| what | limit |", "|---|---|"]
    lines += [f"| {what} | {limit} |" for what, limit in _limits().items()]
    return "\n".join([*lines, ""])


def _row(option: Option) -> str:
    words = " ".join(word for word in (option.name, option.metavar) if word)
    names = ", ".join(f"`{word}`" for word in (option.short, words.replace("|", "\\|")) if word)
    return f"| {names} | {option.help} |"


def _limits() -> dict[str, str]:
    sessions = ServerConfig.max_sessions
    return {
        "prefixes": f"{sessions // 2}: two of the {sessions} sessions each, K and V; one more lets "
        "the least recently used go, with tenants that of whoever has the most. "
        "`--max-sessions`, twice the prefixes wanted, allows more; the embedded server has a limit "
        "of its own",
        "bytes on disk": "without `--disk-budget` none but the disk's; with it, "
        f"half as much, {RESERVED_FREE_BYTES >> 30} GiB at most, is left free on the disk besides",
        "deletions of keys on a full disk": f"{RESERVE_BYTES >> 10} KiB of records, some 1,500 "
        "keys one by one, until what lives fits on the disk and is saved; then they are refused "
        "until others make room, and `FLUSHALL` alone goes through",
        "memory": "without `--maxmemory` none; plain keys lie in memory, rows do not; no key is "
        "evicted for another (redis's other policies are refused: what is stored stays); K/V in "
        "memory for attention leave before a write is refused",
        "connections": f"{ServerConfig.max_connections:,}; `--maxclients`. Fewer where `ulimit -n` "
        "has no two descriptors for each: a quarter of them, 64 at least, is left to files; "
        "`CONFIG GET maxclients` tells",
        "a namespace": f"{MAX_NAMESPACE_BYTES:,} bytes",
        "layers of a session": f"0 to {MAX_LAYER}",
        "a value of a key": _size(MAX_STRING_BYTES),
        "a reply": f"{_size(MAX_REPLY_BYTES)} a string",
        "a pattern of `KEYS`, `SCAN`, `CONFIG GET`": f"{MAX_PATTERN_BYTES:,} bytes",
        "a transaction": f"{MAX_QUEUED_COMMANDS:,} commands, {_size(MAX_QUEUED_BYTES)} of words",
        "the file name of a portable copy": f"{MAX_FILE_NAME_BYTES} bytes, in the data folder; it "
        "replaces another copy, no other file",
        "half a command": f"{ServerConfig.stall_seconds:.0f} s of silence; `--stall-timeout`",
        "an unread reply": f"{ServerConfig.output_seconds:.0f} s; `--output-timeout`",
    }


def _size(nbytes: int) -> str:
    return f"{nbytes >> 30} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(manual(), encoding="utf-8")
