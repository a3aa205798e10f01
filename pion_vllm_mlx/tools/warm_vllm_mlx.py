"""warm for ``serve --engine vllm-mlx``: through vllm-mlx's own application, in this process.

It is loaded as serve loads it, and asked what a client would ask it: so every flag of it, its
chat template and what it makes of a prompt are those of serve, and so is the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.leading_system import OTHER_USER
from pion_vllm_mlx.cache.lineage import LineageStore, anchor_length
from pion_vllm_mlx.cache.vllm_mlx_backend import (
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_usage import Rendered
from pion_vllm_mlx.errors import ConfigError, PionError
from pion_vllm_mlx.serve.engine_child import EngineLink
from pion_vllm_mlx.serve.engine_vllm_mlx import parse, set_log_level, settings, with_application
from pion_vllm_mlx.serve.engine_vllm_mlx_app import asked_of, on_mlx_thread, render
from pion_vllm_mlx.serve.gate import tenant_of
from pion_vllm_mlx.serve.pion_flags import PionFlags
from pion_vllm_mlx.tools.warming import NotWarmed, Warmed, refuse_short, stored_as, why_not_stored

WRITE_SECONDS = 600.0
ANOTHER_USER = {"role": "user", "content": "."}
_SCOPE: dict[str, Any] = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"127.0.0.1")],
    "client": ("127.0.0.1", 0),
    "server": ("127.0.0.1", 0),
}

Json = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A file's name, and its chat body: system part and a user message."""

    file: str
    body: Json


def warm_all(
    flags: PionFlags, api_key: str | None, words: Sequence[str], wanted: Sequence[Wanted], pin: bool
) -> list[Warmed | PionError]:
    """What became of each file. Raises ConfigError, PionMlxCompatError; code 2 for a wrong use."""
    if importlib.util.find_spec("vllm_mlx") is None:
        raise ConfigError("vllm-mlx is not installed: pip install 'pion-vllm-mlx[vllm-mlx]'")
    if not flags.enabled:
        raise ConfigError("--no-pion leaves nothing to do here")
    key = api_key if api_key is not None else config.serve_api_key()
    parsed = parse(["--log-level", "WARNING", *flags.to_arguments(), *words])
    parsed = replace(parsed, link=EngineLink(tenant=tenant_of(key)))
    found: list[Warmed | PionError] = []
    install_vllm_mlx_backend(settings=settings(parsed))
    try:
        set_log_level(parsed.log_level)

        def run(app: Any, **options: Any) -> None:
            found.extend(asyncio.run(_warmed(app, parsed.model, wanted, pin)))

        with contextlib.redirect_stdout(sys.stderr):  # vllm-mlx prints its settings
            with_application(parsed, run)
    finally:
        uninstall_vllm_mlx_backend()
    return found


async def _warmed(
    app: Any, model: str, wanted: Sequence[Wanted], pin: bool
) -> list[Warmed | PionError]:
    found: list[Warmed | PionError] = []
    async with app.router.lifespan_context(app):
        for one in wanted:
            try:
                found.append(await _warm(app, model, one, pin))
            except PionError as error:
                found.append(error)
    return found


async def _warm(app: Any, model: str, wanted: Wanted, pin: bool) -> Warmed:
    began = time.perf_counter()
    body = {"temperature": 0, **wanted.body, "model": model}
    leading = [one for one in body["messages"] if one["role"] != "user"]
    mine = await _rendered(app, {**body, "messages": [*leading, ANOTHER_USER]})
    other = await _rendered(app, {**body, "messages": [*leading, OTHER_USER]})
    cache = mine.core.scheduler.memory_aware_cache
    store: LineageStore | None = cache.store_or_none()
    if store is None or store.bypass is not None:
        why = store.bypass if store is not None else "no store"
        raise ConfigError(f"prefixes of this model are not stored: {why}")
    anchor = anchor_length(other.tokens, mine.tokens)
    refuse_short(anchor, store.options.min_gain)
    match = await on_mlx_thread(mine.core, lambda: store.match(mine.tokens[: anchor + 1]))
    computed = anchor - match.length
    if computed:
        asked = {**body, "messages": [*leading, ANOTHER_USER], "max_tokens": 1, "stream": False}
        said = await asked_of(app, _SCOPE, asked)
        if said[0]["status"] != 200:
            raise NotWarmed(f"vllm-mlx answers {said[0]['status']}: {_text(said)}")
        if not await asyncio.to_thread(store.flush, WRITE_SECONDS):
            raise NotWarmed("the store takes too long to write it")
        match = await on_mlx_thread(mine.core, lambda: store.match(mine.tokens[: anchor + 1]))
    if match.length < anchor:
        raise NotWarmed(f"it was not stored: {why_not_stored(store) or match.why}")
    conversation = stored_as(match)
    if pin:
        await on_mlx_thread(mine.core, lambda: store.pin(conversation))
    seconds = round(time.perf_counter() - began, 3)
    return Warmed(wanted.file, conversation, anchor, computed, seconds, pin)


async def _rendered(app: Any, body: Json) -> Rendered:
    found, said = await render(app, _SCOPE, body)
    if found is None:
        raise ConfigError(f"the chat template refuses this: {_text(said)}")
    return found


def _text(said: Sequence[Any]) -> str:
    """The body of an answer, shortened."""
    raw = b"".join(bytes(one.get("body", b"")) for one in said)
    return raw.decode("utf-8", "replace")[:200]
