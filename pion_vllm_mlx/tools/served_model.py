"""A model loaded as ``serve --engine mlx-lm`` loads it, and the very key it stores under.

mlx-lm's own command line is run with ``mlx_lm.server.run`` replaced, as the engine does it: so
every flag of the engine (an adapter, a chat template, quantized caches) means the same here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.serve.engine_child import EngineLink
from pion_vllm_mlx.serve.engine_flags import refuse_wrong_sizes, refuse_wrong_values
from pion_vllm_mlx.serve.engine_mlx_lm import lineage_options
from pion_vllm_mlx.serve.engine_mlx_lm_anchor import Anchors
from pion_vllm_mlx.serve.engine_mlx_lm_prepare import REFUSALS
from pion_vllm_mlx.serve.engine_mlx_lm_seams import check_seams
from pion_vllm_mlx.serve.gate import tenant_of
from pion_vllm_mlx.serve.pion_flags import PionFlags

Json = dict[str, Any]

_NOT_LOADED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
"""What mlx-lm and its libraries raise for a model that is none."""


def add_key(parser: argparse.ArgumentParser) -> None:
    """The flag that says whose prefixes are meant: two API keys never share any."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the key that serve has, if it has one (default: $PION_API_KEY)",
    )


@dataclass
class ServedModel:
    """A loaded model; ``provider`` is mlx-lm's, ``options`` are what serve stores with."""

    provider: Any
    options: LineageOptions
    _anchors: Anchors = field(default_factory=Anchors)

    @property
    def cli(self) -> Any:
        """The engine's flags."""
        return self.provider.cli_args

    @property
    def tokenizer(self) -> Any:
        return self.provider.tokenizer

    def open_store(self) -> LineageStore:
        """The store, under the key that serve has. Raises ConfigError where it keeps nothing."""
        model, draft = self.provider.model, self.provider.draft_model
        store = LineageStore(model, self.options, draft_model=draft)
        if store.bypass is not None:
            raise ConfigError(f"prefixes of this model are not stored: {store.bypass}")
        return store

    def rendered(self, body: Json) -> tuple[list[int], int | None]:
        """The tokens of a body, and where a chat's system part ends, as serve sees them.

        Raises ConfigError for a body that the template refuses.
        """
        server: Any = importlib.import_module("mlx_lm.server")
        if "messages" not in body:
            return list(self.tokenizer.encode(body["prompt"])), None
        request = server.CompletionRequest(
            "chat", "", body["messages"], body.get("tools") or None, body.get("role_mapping")
        )
        settings = body.get("chat_template_kwargs")
        try:
            tokens = server.ResponseGenerator._tokenize(
                SimpleNamespace(model_provider=self.provider),
                self.tokenizer,
                request,
                SimpleNamespace(chat_template_kwargs=settings),
            )[0]
            every: Mapping[str, Any] = {**self.cli.chat_template_args, **(settings or {})}
            anchor = self._anchors.length(self.tokenizer, request, every, tokens)
        except REFUSALS as error:
            raise ConfigError(f"the chat template refuses this: {error}") from error
        return list(tokens), anchor


def with_served_model(
    flags: PionFlags, api_key: str | None, words: Sequence[str], use: Callable[[ServedModel], int]
) -> int:
    """Load the model that the engine's flags ``words`` name, and use it; the exit code.

    Raises ConfigError for one that cannot be loaded, PionMlxCompatError, and what ``use``
    raises. Flags that the engine refuses end the process with code 2.
    """
    check_seams()
    server: Any = importlib.import_module("mlx_lm.server")
    key = api_key if api_key is not None else config.serve_api_key()
    link = EngineLink(tenant=tenant_of(key))
    codes: list[int] = []

    def run(host: str, port: int, model_provider: Any, **unused: Any) -> None:
        cli = vars(model_provider.cli_args)
        refuse_wrong_values(cli)
        options = lineage_options(flags, link, cli)
        if options is None:
            raise ConfigError("--no-pion leaves nothing to do here")
        try:
            model_provider.load_default()
        except _NOT_LOADED as error:
            name = model_provider.cli_args.model
            raise ConfigError(f"the model {name} cannot be loaded: {error}") from error
        codes.append(use(ServedModel(model_provider, options)))

    original, size, arguments = server.run, server._parse_size, sys.argv
    refuse_wrong_sizes(server)
    server.run, sys.argv = run, ["mlx_lm.server", "--log-level", "WARNING", *words]
    try:
        server.main()
    finally:
        server.run, server._parse_size, sys.argv = original, size, arguments
    return codes[0]
