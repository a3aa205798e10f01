"""The console commands ``pion-vllm-mlx`` and ``pion-server``.

Each subcommand is a row of ``COMMANDS``: its module is imported when it is asked for, so that
``server`` never imports mlx and ``--help`` imports little.  ``data``, which is small, is here.

Exit codes: 0 done, 1 failed or a part is missing, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pion_vllm_mlx import __version__, config
from pion_vllm_mlx.cache import data_folder
from pion_vllm_mlx.errors import PionError

PROGRAM = "pion-vllm-mlx"


@dataclass(frozen=True)
class Command:
    """One subcommand: ``module.function(arguments) -> exit code``.

    ``extra`` is what to install when the module lacks something.
    """

    module: str
    summary: str
    extra: str | None = None
    function: str = "main"


COMMANDS: dict[str, Command] = {
    "server": Command("pion_vllm_mlx.server.main", "run the server (pion-server is the same)"),
    "demo": Command("pion_vllm_mlx.demo.run", "see a prefix reused by other processes", "demo"),
    "serve": Command(
        "pion_vllm_mlx.serve.main", "OpenAI and Anthropic endpoints over a local model", "serve"
    ),
    "stats": Command("pion_vllm_mlx.tools.stats", "what a running server did and holds"),
    "warm": Command(
        "pion_vllm_mlx.tools.warm", "prefill system prompts before anybody asks", "serve"
    ),
    "conversations": Command(
        "pion_vllm_mlx.tools.conversations", "list, pin, export, branch, delete", "mlx"
    ),
    "explain": Command(
        "pion_vllm_mlx.tools.explain", "why a request or a namespace is a hit or a miss", "serve"
    ),
    "doctor": Command("pion_vllm_mlx.tools.doctor", "check a data folder, changing nothing"),
    "export": Command(
        "pion_vllm_mlx.tools.prompt_file", "a prefix as mlx-lm's cache file", "mlx", "export_main"
    ),
    "import": Command(
        "pion_vllm_mlx.tools.prompt_file", "store what export wrote", "mlx", "import_main"
    ),
    "data": Command(__name__, "the stored prefixes: path, size, clear", function="data_main"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``pion-vllm-mlx`` with ``arguments`` (default: the process's); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"{PROGRAM} {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(_unknown(words[0]), file=sys.stderr)
        return 2
    return _run(words[0], command, words[1:])


def server_main() -> int:
    """The console command ``pion-server``."""
    return _run("server", COMMANDS["server"], sys.argv[1:])


def usage() -> str:
    """The help text: one line a subcommand."""
    width = max(map(len, COMMANDS))
    lines = [f"usage: {PROGRAM} COMMAND [arguments]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", f"{PROGRAM} COMMAND --help tells more; --version prints the version."]
    return "\n".join(lines)


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else f"; one of: {', '.join(COMMANDS)}"
    return f"{PROGRAM}: unknown command {word!r}{hint}"


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    """Import the command's module and run it; a missing part and a refusal become one line."""
    if name == "server":
        config.set_up_products()
    try:
        module = importlib.import_module(command.module)
        code = int(getattr(module, command.function)(list(arguments)))
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if root == __package__ or command.extra is None:
            raise
        print(
            f"{PROGRAM} {name}: the Python module {error.name} is missing: "
            f"pip install '{PROGRAM}[{command.extra}]'",
            file=sys.stderr,
        )
    except PionError as error:
        print(f"{PROGRAM} {name}: {error}", file=sys.stderr)
    except BrokenPipeError:
        # Who read has gone, such as head: what is still buffered may not fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 1


def data_main(arguments: Sequence[str]) -> int:
    """``data path|size|clear``: say where the store lies, what it takes, or empty it."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} data", description="The data folder of the embedded server."
    )
    parser.add_argument("action", choices=("path", "size", "clear"))
    parser.add_argument("--dir", type=Path, default=None, help="another data folder")
    options = parser.parse_args(arguments)
    folder: Path = options.dir if options.dir is not None else config.data_dir()
    try:
        print(_data_action(options.action, folder))
    except OSError as error:
        print(f"{PROGRAM} data {options.action}: {error}", file=sys.stderr)
        return 1
    return 0


def _data_action(action: str, folder: Path) -> str:
    """Do it, and say what was done."""
    if action == "path":
        return str(folder)
    if action == "size":
        size = data_folder.measure(folder)
        return f"{size.disk_bytes} bytes in {size.files} files in {folder}"
    size = data_folder.clear(folder)
    return f"removed {size.disk_bytes} bytes in {size.files} files from {folder}"
