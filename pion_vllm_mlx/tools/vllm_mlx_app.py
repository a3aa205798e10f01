"""vllm-mlx's own application in this process, for tools that need what ``serve`` has.

It is loaded as serve loads it, and asked what a client would ask it: so every flag of it, its
chat template and what it makes of a prompt are those of serve, and so is the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.vllm_mlx_backend import (
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.cache.vllm_mlx_backend_usage import Rendered
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.serve.engine_child import EngineLink
from pion_vllm_mlx.serve.engine_vllm_mlx import (
    NOT_LOADED,
    parse,
    set_log_level,
    settings,
    with_application,
)
from pion_vllm_mlx.serve.engine_vllm_mlx_app import explanation, render
from pion_vllm_mlx.serve.gate import tenant_of
from pion_vllm_mlx.serve.pion_flags import PionFlags

SCOPE: dict[str, Any] = {
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
T = TypeVar("T")
Use = Callable[[Any, str], Awaitable[T]]
"""Is given the application, and the name of its model."""


def with_vllm_mlx(flags: PionFlags, api_key: str | None, words: Sequence[str], use: Use[T]) -> T:
    """What ``use`` gives. Flags that vllm-mlx does not know end the process with code 2.

    Raises ConfigError, PionMlxCompatError, and what ``use`` raises. A process in which this
    was called ends by ``os._exit``: MLX's own streams of vllm-mlx's thread would now and then
    abort it in its static destructors, as those of the engine would.
    """
    if importlib.util.find_spec("vllm_mlx") is None:
        raise ConfigError("vllm-mlx is not installed: pip install 'pion-vllm-mlx[vllm-mlx]'")
    if not flags.enabled:
        raise ConfigError("--no-pion leaves nothing to do here")
    key = api_key if api_key is not None else config.serve_api_key()
    parsed = parse(["--log-level", "ERROR", *flags.to_arguments(), *words])
    parsed = replace(parsed, link=EngineLink(tenant=tenant_of(key)))
    found: list[T] = []
    install_vllm_mlx_backend(settings=settings(parsed))
    try:
        set_log_level(parsed.log_level)

        def run(app: Any, **options: Any) -> None:
            found.append(asyncio.run(_used(app, parsed.model, use)))

        with contextlib.redirect_stdout(sys.stderr):  # vllm-mlx prints its settings
            try:
                with_application(parsed, run)
            except ConfigError:
                raise
            except NOT_LOADED as error:
                if found:
                    raise
                raise ConfigError(f"the model {parsed.model} cannot be used: {error}") from error
    finally:
        uninstall_vllm_mlx_backend()
    return found[0]


def explain(flags: PionFlags, api_key: str | None, words: Sequence[str], body: Json) -> Json:
    """Why a chat body is not a longer hit. Raises as ``with_vllm_mlx`` does."""

    async def use(app: Any, model: str) -> Json:
        asked = await rendered(app, {"temperature": 0, **body, "model": model})
        return await explanation(asked)

    return with_vllm_mlx(flags, api_key, words, use)


async def rendered(app: Any, body: Json) -> Rendered:
    """The prompt that a chat body is. Raises ConfigError."""
    found, said = await render(app, SCOPE, body)
    if found is None:
        raise ConfigError(f"the chat template refuses this: {text_of(said)}")
    return found


def text_of(said: Sequence[Any]) -> str:
    """The body of an answer, shortened."""
    raw = b"".join(bytes(one.get("body", b"")) for one in said)
    return raw.decode("utf-8", "replace")[:200]


async def _used(app: Any, model: str, use: Use[T]) -> T:
    async with app.router.lifespan_context(app):
        return await use(app, model)
