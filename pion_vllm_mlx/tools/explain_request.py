"""``pion-vllm-mlx explain --request BODY.json`` and ``--last``: why a prompt was not reused.

A running ``serve`` is asked, which knows its model. Without one, ``--model`` loads the model
as serve does, for its key and its tokenizer, and looks into the store itself.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_vllm_mlx import config
from pion_vllm_mlx.errors import ConfigError, StoreUnavailable
from pion_vllm_mlx.serve.chat_form import COMPLETIONS, EXPLAINED_APIS
from pion_vllm_mlx.serve.options import DEFAULT_PORT
from pion_vllm_mlx.serve.pion_flags import PionFlags, add_pion_flags, port
from pion_vllm_mlx.tools.explain_advice import causes
from pion_vllm_mlx.tools.request_file import (
    api_of,
    explained_body,
    parse,
    read_bytes,
    refuse_missing_model,
)

Json = dict[str, Any]

SECONDS = 300.0


class NoServe(StoreUnavailable):
    """Nothing listens where a serve was looked for."""


@dataclass(frozen=True)
class Serve:
    """Where a serve listens, and the key that it wants."""

    host: str
    port: int
    api_key: str | None

    def post(self, path: str, body: Json) -> Json:
        """The JSON of an answer. Raises NoServe, ConfigError for a refusal."""
        raw = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        where = f"{self.host}:{self.port}"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            with contextlib.closing(connection):
                connection.request("POST", path, raw, headers)
                answer = connection.getresponse()
                status, said = answer.status, answer.read()
        except ConnectionRefusedError as error:
            raise NoServe(f"no serve listens on {where}") from error
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"the serve on {where} does not answer: {error}") from error
        try:
            value = json.loads(said)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"what listens on {where} is no pion-vllm-mlx serve")
        if status != 200:
            raise ConfigError(f"the serve on {where} refuses: {_refusal(value) or status}")
        return value


def main(arguments: Sequence[str]) -> int:
    """The command; 0 when something of the prompt is reused, 1 when nothing is, or it fails."""
    parser = _parser()
    options, words = parser.parse_known_args(list(arguments))
    if words and not options.model:
        parser.error(f"unknown flags (those of an engine need --model): {' '.join(words)}")
    if options.last and options.api:
        parser.error("--api is of a --request")
    body = _read(options) if options.request is not None else None
    told = _told(options, words, body)
    api = _api(options, body or {})
    chat = explained_body(options.request, body, api) if body else None
    found = {**told, "causes": causes(told, chat) if "common" in told else []}
    print(json.dumps(found) if options.json else "\n".join(lines(found)))
    code = 0 if told.get("restorable") else 1
    if options.engine == "vllm-mlx" and "vllm_mlx" in sys.modules:  # see with_vllm_mlx
        sys.stdout.flush()
        os._exit(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx explain",
        usage="%(prog)s (--request BODY.json | --last) [flags] [the engine's flags]",
        description="Why a request is not a longer hit: the nearest stored prefix, the first "
        "token that differs, or the field of the key, and what helps. Exit code 0: a part of "
        "it is reused; 1: nothing is.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--request", type=Path, metavar="BODY.json", help="- is standard input")
    what.add_argument("--last", action="store_true", help="the last request that missed")
    parser.add_argument(
        "--api", choices=EXPLAINED_APIS, help="whose body it is (default: by its fields)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="of the serve to ask")
    parser.add_argument(
        "--port", type=port, default=DEFAULT_PORT, help=f"and its port (default: {DEFAULT_PORT})"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="the key that serve has (default: $PION_API_KEY)"
    )
    parser.add_argument("--model", help="without a running serve: the model that would be asked")
    parser.add_argument(
        "--engine", choices=("mlx-lm", "vllm-mlx"), default="mlx-lm", help="and its engine"
    )
    parser.add_argument(
        "--no-normalize", action="store_true", help="as serve's: keep metadata of agents"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_pion_flags(parser)
    return parser


def _read(options: argparse.Namespace) -> Json:
    body = parse(options.request, read_bytes(options.request))
    if not body:
        raise ConfigError(f"{options.request} is an empty object")
    return body


def _api(options: argparse.Namespace, body: Json) -> str:
    """Whose request a body is, as told or by its fields."""
    if options.api:
        return str(options.api)
    return COMPLETIONS if "prompt" in body and "messages" not in body else api_of(body)


def _told(options: argparse.Namespace, words: Sequence[str], body: Json | None) -> Json:
    """The answer of a serve, or of the store itself."""
    key = options.api_key if options.api_key is not None else config.serve_api_key()
    path = "/v1/pion/explain"
    if body is not None:
        path += f"?api={_api(options, body)}"
    try:
        return Serve(options.host, options.port, key).post(path, body or {})
    except NoServe as error:
        if body is None:
            raise NoServe(f"{error}: only a running one knows its last miss") from error
        if not options.model:
            raise NoServe(f"{error}: name its --port, or a --model to look without it") from error
    return _without_serve(options, words, body)


def _without_serve(options: argparse.Namespace, words: Sequence[str], body: Json) -> Json:
    api, normalize = _api(options, body), not options.no_normalize
    chat = explained_body(options.request, body, api, normalize=normalize)
    refuse_missing_model(options.model)
    flags, words = PionFlags.from_options(options), ["--model", options.model, *words]
    if options.engine == "vllm-mlx":
        from pion_vllm_mlx.tools import vllm_mlx_app

        return vllm_mlx_app.explain(flags, options.api_key, words, chat)
    from pion_vllm_mlx.serve.explained import explained
    from pion_vllm_mlx.tools.served_model import ServedModel, with_served_model

    found: list[Json] = []

    def use(served: ServedModel) -> int:
        store = served.open_store()
        try:
            tokens, _ = served.rendered(chat)
            found.append(explained(store.explain(tokens), served.tokenizer.decode, tokens))
        finally:
            store.close()
        return 0

    with_served_model(flags, options.api_key, words, use)
    return found[0]


def lines(found: Json) -> list[str]:
    """The explanation for people."""
    if "common" not in found:
        return [str(found.get("sentence") or "there is nothing to explain")]
    prompt, common = int(found.get("prompt_tokens") or 0), int(found["common"])
    out = [f"the prompt has {prompt:,} tokens"]
    if common:
        out += [
            f"  nearest stored         {int(found['stored']):,} tokens, replies among them",
            f"  in common              {common:,} tokens",
        ]
    out.append(f"  reused                 {int(found['restorable']):,} tokens")
    asked, stored = found.get("asked_text"), found.get("stored_text")
    if isinstance(asked, dict) and isinstance(stored, dict):
        out.append(f"  first difference at token {found['position']}:")
        out.append(f"    stored  {_shown(stored, found.get('stored_token'))}")
        out.append(f"    asked   {_shown(asked, found.get('asked_token'))}")
    if found.get("sentence"):
        out.append(f"  {found['sentence']}")
    return [*out, *(f"  -> {cause}" for cause in found["causes"])]


def _shown(text: Json, token: int | None) -> str:
    """The text around a token, which stands in brackets."""
    before, after = (_escaped(str(text.get(name, ""))) for name in ("before", "after"))
    if token is None:
        return f"{before}[end]"
    return f"{before}[{_escaped(str(text.get('token', '')))}]{after}  (token {token})"


def _escaped(text: str) -> str:
    """On one line, and harmless to a terminal."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def _refusal(value: Json) -> str:
    error = value.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
