"""``pion-vllm-mlx warm FILE --model M``: prefill system prompts before anybody asks.

What is stored is what ``serve`` keeps of the first request with such a system prompt: the
prompt up to the end of system messages and tools, as an anchor, under the same key. It is
pinned, so that no budget throws it out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.leading_system import OTHER_USER, leading_system
from pion_vllm_mlx.cache.lineage import LineageStore
from pion_vllm_mlx.errors import ConfigError, PionError
from pion_vllm_mlx.serve.chat_form import APIS
from pion_vllm_mlx.serve.engine_mlx_lm_single import Prefill
from pion_vllm_mlx.serve.normalize import strip_metadata
from pion_vllm_mlx.serve.pion_flags import PionFlags, add_pion_flags
from pion_vllm_mlx.tools.request_file import (
    api_of,
    engine_body,
    parse,
    read_bytes,
    refuse_missing_model,
)
from pion_vllm_mlx.tools.served_model import ServedModel, add_key, with_served_model
from pion_vllm_mlx.tools.warming import NotWarmed, Warmed, refuse_short, stored_as, why_not_stored

WRITE_SECONDS = 600.0
_PREFILL_FLAGS = ("prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")


def main(arguments: Sequence[str]) -> int:
    """The command; 0 when every file is stored, 1 otherwise. With vllm-mlx it ends the process."""
    parser = _parser()
    options, words = parser.parse_known_args(list(arguments))
    bodies = [(str(path), _body(path, options)) for path in options.files]
    refuse_missing_model(options.model)
    words = ["--model", options.model, *words]
    flags = PionFlags.from_options(options)
    if options.engine == "vllm-mlx":
        code = _warm_vllm_mlx(flags, words, bodies, options)
        sys.stdout.flush()
        sys.stderr.flush()
        # Everything is stored and closed. MLX's own streams of vllm-mlx's thread would now and
        # then abort the process in its static destructors, as those of the engine would.
        os._exit(code)

    def use(served: ServedModel) -> int:
        return _warm_all(served, bodies, options)

    return with_served_model(flags, options.api_key, words, use)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx warm",
        usage="%(prog)s [flags] FILE... --model MODEL [the engine's flags]",
        description="Prefills system prompts, with tools, and stores them pinned, where "
        "pion-vllm-mlx serve finds them. A FILE is a text, the system prompt itself, or a "
        "request body (.json) of one of serve's APIs, of which system prompt and tools are "
        "taken. Give the flags that serve has: the store's, and the engine's.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="- is standard input")
    parser.add_argument("--model", required=True, help="path or repository")
    parser.add_argument(
        "--engine", choices=("mlx-lm", "vllm-mlx"), default="mlx-lm", help="as serve's"
    )
    parser.add_argument(
        "--api", choices=("text", *APIS), help="what a FILE is (default: by name and content)"
    )
    parser.add_argument("--no-pin", action="store_true", help="store, but do not pin")
    parser.add_argument(
        "--no-normalize", action="store_true", help="as serve's: keep metadata of agents"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    add_key(parser)
    add_pion_flags(parser)
    parser.set_defaults(pion_budget_gb=0.0)  # warming must not throw out what serve has stored
    return parser


def _body(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The chat body of a file: its system part, and a user message. Raises ConfigError."""
    raw = read_bytes(path)
    api, normalize = options.api, not options.no_normalize
    if api is None and path.suffix != ".json":
        api = "text"
    if api == "text":
        return {"messages": [_system(path, raw, normalize), OTHER_USER]}
    given = parse(path, raw)
    api = api or api_of(given)
    # the messages do not matter, and a file of a system prompt alone has none
    if api == "responses":
        given = {**given, "input": given.get("input") or OTHER_USER["content"]}
    elif not given.get("messages"):
        given = {**given, "messages": [OTHER_USER]}
    body = engine_body(path, given, api, normalize=normalize)
    leading = leading_system(body["messages"])
    if not leading and not body.get("tools"):
        raise ConfigError(f"{path} has neither a system prompt nor tools")
    return {**body, "messages": [*leading, dict(OTHER_USER)]}


def _system(path: Path, raw: bytes, normalize: bool) -> dict[str, str]:
    """The system message of a text, less the line end that editors put behind it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text") from error
    text = text.removesuffix("\n").removesuffix("\r")
    text = strip_metadata(text) if normalize else text
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return {"role": "system", "content": text}


def _warm_all(
    served: ServedModel, bodies: Sequence[tuple[str, dict[str, Any]]], options: argparse.Namespace
) -> int:
    store = served.open_store()
    results: list[dict[str, Any]] = []
    try:
        for name, body in bodies:
            try:
                done = warm(served, store, name, body, pin=not options.no_pin)
            except PionError as error:
                results.append({"file": name, "error": str(error)})
            else:
                results.append(vars(done))
    finally:
        store.close(WRITE_SECONDS)
    return _told(results, options)


def _warm_vllm_mlx(
    flags: PionFlags,
    words: Sequence[str],
    bodies: Sequence[tuple[str, dict[str, Any]]],
    options: argparse.Namespace,
) -> int:
    from pion_vllm_mlx.tools.warm_vllm_mlx import Wanted, warm_all

    wanted = [Wanted(name, body) for name, body in bodies]
    done = warm_all(flags, options.api_key, words, wanted, not options.no_pin)
    results = [
        vars(one) if isinstance(one, Warmed) else {"file": of.file, "error": str(one)}
        for of, one in zip(wanted, done, strict=True)
    ]
    return _told(results, options)


def _told(results: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Prints what became of the files; the exit code."""
    print(json.dumps(results) if options.json else "\n".join(map(_line, results)))
    return 1 if any("error" in one for one in results) else 0


def warm(
    served: ServedModel, store: LineageStore, name: str, body: dict[str, Any], *, pin: bool
) -> Warmed:
    """Has the system part of a chat body stored. Raises NotWarmed, ConfigError."""
    began = time.perf_counter()
    tokens, anchor = served.rendered(body)
    if not served.tokenizer.has_chat_template:
        raise NotWarmed(
            "the system part is not stored: the model has no chat template, so that serve knows "
            "no system prompt"
        )
    anchor = anchor or 0
    refuse_short(anchor, store.options.min_gain)
    match = store.match(tokens[: anchor + 1])
    if match.why.startswith("no store"):
        raise NotWarmed(match.why)
    computed = 0
    if match.length < anchor:
        computed = _compute(served, store, tokens[:anchor])
        match = store.match(tokens[: anchor + 1])
    if match.length < anchor:
        raise NotWarmed(f"it was not stored: {why_not_stored(store) or match.why}")
    conversation = stored_as(match)
    if pin:
        store.pin(conversation)
    pinned = store.is_pinned(conversation)
    seconds = time.perf_counter() - began
    return Warmed(name, conversation, anchor, computed, round(seconds, 3), pinned)


def _compute(served: ServedModel, store: LineageStore, tokens: list[int]) -> int:
    """Prefills what is not stored of ``tokens`` and keeps it; how many the model saw."""
    provider, cli = served.provider, served.cli
    match = store.match([*tokens, 0])
    restored = store.restore(match)
    caches: list[Any] = (
        restored.caches if restored is not None else make_prompt_cache(provider.model)
    )
    if restored is None and provider.draft_model is not None:
        caches = [*caches, *make_prompt_cache(provider.draft_model)]
    at = restored.length if restored is not None else 0
    settings = {
        "model": provider.model,
        "draft_model": provider.draft_model,
        "prompt_cache": caches,
        **{name: vars(cli).get(name) for name in _PREFILL_FLAGS},
    }
    Prefill(settings, len(tokens) - at).extend(tokens[at:])
    store.keep(tokens, caches, "anchor")
    if not store.flush(WRITE_SECONDS):
        raise NotWarmed("the store takes too long to write it")
    return len(tokens) - at


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['file']}: {result['error']}"
    computed = result["computed"]
    told = f"{computed:,} computed in {result['seconds']:.1f} s" if computed else "stored already"
    pinned = ", pinned" if result["pinned"] else ""
    return (
        f"{result['file']}: {result['tokens']:,} tokens, {told}{pinned} as {result['conversation']}"
    )
