"""``pion-vllm-mlx conversations``: what is stored, to list, pin, copy, branch and delete.

A conversation is a leaf of a lineage; its id is ``<model's key>:<segment>``. What several
have in common is stored once. Without a word: the list.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pion_vllm_mlx.cache.identity_names import first_difference
from pion_vllm_mlx.cache.lineage.client import LineageClient
from pion_vllm_mlx.cache.lineage.conversations import Conversations
from pion_vllm_mlx.cache.lineage.model_key import NATIVE, ModelKey
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.serve.pion_flags import PionFlags, whole_number
from pion_vllm_mlx.tools import conversation_file
from pion_vllm_mlx.tools.lineage_access import (
    DEADLINE_SECONDS,
    DEFAULT_URL,
    Listed,
    Shelf,
    is_shown,
    lineages,
    may_be_of,
)
from pion_vllm_mlx.tools.prompt_file import SUFFIX
from pion_vllm_mlx.tools.request_file import refuse_missing_model
from pion_vllm_mlx.tools.store_access import add_url, duration_text, size_text

WORD_TOKENS = 24
SHOWN_CHARACTERS = 48
_LEAST_WORDS = 4
_NO_TOKENIZER = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
"""What mlx-lm and transformers raise for a folder without a tokenizer."""


def main(arguments: Sequence[str]) -> int:
    """The command; 0 done, 1 refused, 2 wrong usage."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "list")
    options = _parser().parse_args(words)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx conversations",
        description="The conversations that serve has stored: list them, keep them from being "
        "thrown out, copy them to files and back, branch and delete them.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(name: str, run: Callable[[argparse.Namespace], int], told: str) -> Any:
        one = actions.add_parser(name, help=told, description=told[:1].upper() + told[1:] + ".")
        one.set_defaults(run=run)
        add_url(one, DEFAULT_URL, DEADLINE_SECONDS)
        return one

    listing = action("list", _list, "list the conversations, the latest used first")
    listing.add_argument(
        "--model", help="a model, for its tokenizer: shows how the own part of each begins"
    )
    listing.add_argument("--json", action="store_true", help="as JSON")
    for name, run, told in (
        ("pin", _pin, "keep conversations, and what they stand on, from being thrown out"),
        ("unpin", _unpin, "let pinned conversations be thrown out again"),
        ("delete", _delete, "delete conversations and what only they stand on"),
    ):
        action(name, run, told).add_argument("ids", nargs="+", metavar="ID")
    export = action("export", _export, "write a conversation to a file of mlx-lm's prompt cache")
    export.add_argument("id", metavar="ID")
    export.add_argument("file", type=Path, metavar="FILE", help=f"a name that ends with {SUFFIX}")
    export.add_argument("--force", action="store_true", help="replace a file that is there")
    bring = action("import", _import, "store the conversation of a file that export has written")
    bring.add_argument("file", type=Path, metavar="FILE")
    bring.add_argument("--model", help="refuse a file that is of another model than this one")
    bring.add_argument("--api-key", metavar="KEY", help="with --model: the key that serve has")
    branch = action("branch", _branch, "give the first tokens of a conversation an id of their own")
    branch.add_argument("id", metavar="ID")
    branch.add_argument("--at", type=whole_number, metavar="TOKENS", help="how many (default: all)")
    return parser


# -- list -----------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    config, tokenizer = _tokenizer(options.model) if options.model else ({}, None)
    with lineages(options) as client:
        shelf = Shelf(client)
        found = shelf.all()
        begins = [_begins(shelf, one, config, tokenizer) for one in found]
    if options.json:
        shown = [{**one.as_json(), "begins": text} for one, text in zip(found, begins, strict=True)]
        print(json.dumps(shown))
    else:
        print("\n".join(table(found, begins, time.time())))
    return 0


def _tokenizer(model: str) -> tuple[dict[str, Any], Any]:
    """Configuration and tokenizer of a model. Raises ConfigError."""
    from mlx_lm.utils import _download, load_config, load_tokenizer

    refuse_missing_model(model)
    try:
        folder = _download(model, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", "*.py"])
        tokenizer = load_tokenizer(folder)  # type: ignore[no-untyped-call]
        return dict(load_config(folder)), tokenizer
    except _NO_TOKENIZER as error:
        raise ConfigError(f"the tokenizer of {model} cannot be loaded: {error}") from error


def _begins(shelf: Shelf, one: Listed, config: dict[str, Any], tokenizer: Any) -> str | None:
    """How the last segment of a conversation begins; None where the tokenizer is not its own.

    Behind "…" where it stands on others: what they have in common tells nothing.
    """
    if tokenizer is None or not may_be_of(config, shelf.identity(one.id.rpartition(":")[0])):
        return None
    if one.own_tokens >= _LEAST_WORDS:
        tokens = shelf.own_tokens([one.id], WORD_TOKENS)[0]
        before = one.tokens - one.own_tokens
    else:  # a branch: what it ends with tells more than its one token
        tokens = shelf.tokens(one.id)[-WORD_TOKENS:]
        before = one.tokens - len(tokens)
    text = "…" * (before > 0) + " ".join(str(tokenizer.decode(tokens.tolist())).split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def table(found: Sequence[Listed], begins: Sequence[str | None], now: float) -> list[str]:
    """The list for people."""
    if not found:
        return ["no conversations are stored"]
    rows = [("ID", "MODEL", "TOKENS", "SIZE", "USED", "", "BEGINS")]
    for one, text in zip(found, begins, strict=True):
        ago = f"{duration_text(max(0.0, now - one.last_used))} ago"
        marks = " ".join(
            word for word, is_so in (("pinned", one.pinned), ("anchor", one.anchor)) if is_so
        )
        size = size_text(one.num_bytes)
        rows.append((one.id, one.model, f"{one.tokens:,}", size, ago, marks, text or ""))
    if not any(row[6] for row in rows[1:]):
        rows = [(*row[:6], "") for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return [
        "  ".join(
            cell.rjust(width) if column in (2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# -- what changes something -------------------------------------------------------


def _each(
    options: argparse.Namespace,
    do: Callable[[Shelf, Conversations, str], str],
    *,
    listed: bool = True,
) -> int:
    """Checks that every id is there, then does one after the other, what stands on others first.

    ``listed``: what was deleted and still leads to others is not there.
    """
    with lineages(options) as client:
        shelf = Shelf(client)
        chains = {name: shelf.chain(name) for name in options.ids}
        for name, chain in chains.items():
            if listed and not is_shown(chain[-1]):
                raise ConfigError(f"{name}: there is no such conversation")
        depth = {name: len(chain) for name, chain in chains.items()}
        for name in sorted(depth, key=lambda name: -depth[name]):
            print(do(shelf, _conversations(client, shelf, name), name))
    return 0


def _conversations(client: LineageClient, shelf: Shelf, name: str) -> Conversations:
    return Conversations(client, shelf.names_of(name))


def _pin(options: argparse.Namespace) -> int:
    def do(shelf: Shelf, model: Conversations, name: str) -> str:
        model.pin(name)
        return f"{name}: pinned"

    return _each(options, do)


def _unpin(options: argparse.Namespace) -> int:
    def do(shelf: Shelf, model: Conversations, name: str) -> str:
        if others := model.unpin(name):
            return f"{name}: stays pinned, since others that are go on from it: {', '.join(others)}"
        return f"{name}: not pinned any more"

    return _each(options, do)


def _delete(options: argparse.Namespace) -> int:
    def do(shelf: Shelf, model: Conversations, name: str) -> str:
        try:
            model.segment(name)
        except KeyError:  # it was there a moment ago
            return f"{name}: deleted with the last that stood on it"
        try:
            gone = model.drop(name)
        except KeyError:
            others = ", ".join(shelf.standing_on(name)) or "its branches"
            raise ConfigError(f"{name} is what others go on from: delete {others} first") from None
        if gone:
            return f"{name}: deleted, {gone} segment{'s' if gone > 1 else ''}"
        if shelf.chain(name)[-1].kids:
            return f"{name}: deleted; what others share with it stays"
        raise ConfigError(f"{name} was just extended by a request, and stays")

    return _each(options, do, listed=False)


def _export(options: argparse.Namespace) -> int:
    path: Path = options.file
    if path.suffix != SUFFIX:
        raise ConfigError(f"{path}: mlx-lm needs a name that ends with {SUFFIX}")
    if path.exists() and not options.force:
        raise ConfigError(f"{path} exists; --force replaces it")
    with lineages(options) as client:
        try:
            tokens = conversation_file.export(Shelf(client), options.id, path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    size = size_text(path.stat().st_size)
    print(f"{options.id}: {tokens:,} tokens, {size} written to {path}")
    return 0


def _import(options: argparse.Namespace) -> int:
    if options.model:
        _require_key(options)
    with lineages(options, create=True) as client:
        done = conversation_file.bring_in(Shelf(client), options.file)
    told = "tokens stored" if done.new else "tokens were stored already"
    print(f"{done.conversation}: {done.tokens:,} {told}")
    return 0


def _require_key(options: argparse.Namespace) -> None:
    """Raises ConfigError for a file that this model will never hit."""
    # needs what serve does; nothing else here does
    from pion_vllm_mlx.tools.served_model import ServedModel, with_served_model

    record, _ = conversation_file.read_key(options.file)
    refuse_missing_model(options.model)
    form = record.identity["format"]
    flags = PionFlags(vquant=None if form == NATIVE else form)

    def use(served: ServedModel) -> int:
        provider = served.provider
        key = ModelKey(provider.model, provider.draft_model, served.options).current()
        field = first_difference(record.identity, json.loads(json.dumps(key.identity)))
        if field is not None:
            raise ConfigError(f"{options.file} is of another key than {options.model}: {field}")
        return 0

    with_served_model(flags, options.api_key, ["--model", options.model], use)


def _branch(options: argparse.Namespace) -> int:
    with lineages(options) as client:
        name, tokens = conversation_file.branch(Shelf(client), options.id, options.at)
    print(f"{name}: the first {tokens:,} tokens of {options.id}")
    return 0
