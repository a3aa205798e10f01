"""vllm-mlx as the engine of ``serve``: ``python -m pion_vllm_mlx.serve.engine_vllm_mlx``.

vllm-mlx's own command line and server, with the backend of ``cache.vllm_mlx_backend`` installed
before either begins, and the engine protocol of ``engine_child`` around its application.  All
of its serve flags pass through; continuous batching is always on, since only it keeps prefixes.
Flags that choose another prefix cache are refused by name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pion_vllm_mlx.cache import vllm_mlx_backend_prefill, vllm_mlx_backend_usage
from pion_vllm_mlx.cache.vllm_mlx_backend import (
    BackendSettings,
    install_vllm_mlx_backend,
    uninstall_vllm_mlx_backend,
)
from pion_vllm_mlx.errors import ConfigError, PionError
from pion_vllm_mlx.serve.batch_processors import keep_processors
from pion_vllm_mlx.serve.engine_child import (
    EngineLink,
    leave_requests_to_front,
    report_ready,
    take_link,
    watch_lifeline,
)
from pion_vllm_mlx.serve.engine_vllm_mlx_app import EngineLayer
from pion_vllm_mlx.serve.engine_vllm_mlx_refusals import check_server, wrong_flag
from pion_vllm_mlx.serve.engine_vllm_mlx_samplers import patch_samplers
from pion_vllm_mlx.serve.engine_vllm_mlx_stops import StopLayer, patch_stops
from pion_vllm_mlx.serve.pion_flags import PionFlags, spare_model, take_pion_flags
from pion_vllm_mlx.serve.store_options import store_options

log = logging.getLogger(__name__)

BACKLOG = 128
#: how long requests may go on after SIGTERM; the front has drained before it sends one.
DRAIN_SECONDS = 20

#: flags of vllm-mlx that choose a prefix cache past the scheduler's seam, and why not.
OTHER_CACHES = {
    "use_paged_cache": "its blocks are not chained to what precedes them",
    "no_memory_aware_cache": "it keeps entries by count, in this process",
    "ssd_cache_dir": "the store is the disk tier",
}

#: what vllm-mlx and its libraries raise for a model that is none
NOT_LOADED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class EngineArguments:
    """A parsed command line: the link to the front, the store, and vllm-mlx's own flags.

    ``reuse`` is False for ``--disable-prefix-cache``.
    """

    link: EngineLink
    pion: PionFlags
    log_level: str
    serve: argparse.Namespace
    reuse: bool = True

    @property
    def model(self) -> str:
        """The name under which vllm-mlx serves the model."""
        return str(self.serve.served_model_name or self.serve.model or "")


def parse(arguments: Sequence[str]) -> EngineArguments:
    """The arguments; exits with code 2 and a sentence for a wrong use."""
    from vllm_mlx.cli import create_parser

    link, rest = take_link(arguments)
    flags, rest = take_pion_flags(spare_model(rest))
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--log-level", type=str.upper, default="INFO")
    own.add_argument("--model", default=None)
    named, rest = own.parse_known_args(rest)
    model = [named.model] if named.model else []
    parser = create_parser()
    parser.prog = "vllm-mlx"
    serve = parser.parse_args(["serve", *model, *rest, "--continuous-batching"])
    for name, reason in OTHER_CACHES.items():
        if vars(serve)[name]:
            parser.error(f"--{name.replace('_', '-')} cannot be used here: {reason}")
    wrong = wrong_flag(serve)
    if wrong is not None:
        parser.error(wrong)
    if not serve.model and not serve.models_config:
        parser.error("name the model: pion-vllm-mlx serve --engine vllm-mlx MODEL")
    serve.host, serve.port, serve.api_key = "127.0.0.1", 0, link.key or None
    # Our cache object stays: with it go the padding of recurrent models, and what knows the model.
    reuse, serve.disable_prefix_cache = not serve.disable_prefix_cache, False
    return EngineArguments(link, flags, named.log_level, serve, reuse)


def settings(arguments: EngineArguments) -> BackendSettings:
    """How the backend uses the store."""
    if not arguments.reuse:
        return BackendSettings(None, keep_live=False)
    options = store_options(arguments.pion, arguments.link)
    # its replies are not continued
    return BackendSettings(None if options is None else replace(options, resume=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if importlib.util.find_spec("vllm_mlx") is None:
        print("vllm-mlx is not installed: pip install 'pion-vllm-mlx[vllm-mlx]'", file=sys.stderr)
        return 1
    if "--help" in words or "-h" in words:
        return _print_help()
    parsed = parse(words)
    watch_lifeline(parsed.link)
    try:
        install_vllm_mlx_backend(settings=settings(parsed))
        check_server()
        patches = [keep_processors(), patch_samplers(), patch_stops()]
    except PionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    set_log_level(parsed.log_level)
    told = (vllm_mlx_backend_prefill, vllm_mlx_backend_usage)
    leave_requests_to_front(parsed.link, *(module.__name__ for module in told))
    try:
        _serve(parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        for patch in reversed(patches):
            patch.undo()
        uninstall_vllm_mlx_backend()
    return 0


def set_log_level(level: str) -> None:
    """Our line a request at INFO; vllm-mlx's lines a step, and prompts in them, at DEBUG."""
    logging.getLogger().setLevel(level)
    logging.getLogger("vllm_mlx").setLevel("WARNING" if level == "INFO" else level)


def _print_help() -> int:
    from vllm_mlx.cli import create_parser

    try:
        create_parser().parse_args(["serve", "--help"])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _serve(parsed: EngineArguments) -> None:
    """vllm-mlx's own serve command, on a socket of ours."""
    import uvicorn

    def run(app: Any, **options: Any) -> None:
        """In uvicorn.run's place: vllm-mlx calls it with its application, once."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        layer = EngineLayer(StopLayer(app), parsed.link, parsed.model)
        level = parsed.log_level
        settings = uvicorn.Config(
            layer,
            log_level="warning" if level == "INFO" else level.lower(),
            backlog=BACKLOG,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        _server(settings, parsed).run(sockets=[listening])

    with_application(parsed, run)


def with_application(parsed: EngineArguments, run: Callable[..., None]) -> None:
    """vllm-mlx's own serve command; ``run(app, **options)`` stands for uvicorn's.

    It prints its settings line by line: they are shown at DEBUG, or where it ends with a word of
    its own. Raises ConfigError for a model that cannot be loaded, not even from the hub.
    """
    import uvicorn
    from vllm_mlx import cli

    original, output, said = uvicorn.run, sys.stdout, io.StringIO()
    loaded: list[bool] = []

    def begin(app: Any, **options: Any) -> None:
        loaded.append(True)
        log.debug("%s", said.getvalue())
        with contextlib.redirect_stdout(output):
            run(app, **options)

    uvicorn.run = begin
    try:
        with contextlib.redirect_stdout(said):
            cli.serve_command(parsed.serve)
    except SystemExit:
        if not loaded:
            print(said.getvalue(), file=sys.stderr)
        raise
    except NOT_LOADED as error:
        if loaded:
            raise
        name = parsed.model or parsed.serve.models_config
        raise ConfigError(f"the model {name} cannot be loaded: {error}") from error
    finally:
        uvicorn.run = original


def _server(settings: Any, parsed: EngineArguments) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Says where it listens once the model is loaded and requests may come."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started and sockets:
                report_ready(parsed.link, sockets[0].getsockname()[1], parsed.model)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """SIGTERM and SIGINT end the server; uvicorn's own way ends the process too."""
            numbers = (signal.SIGTERM, signal.SIGINT)
            before = [signal.signal(number, self.handle_exit) for number in numbers]
            try:
                yield
            finally:
                for number, handler in zip(numbers, before, strict=True):
                    signal.signal(number, handler)

    return Server(settings)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is stored and closed.  MLX's own thread-bound streams would abort the process
    # in its static destructors (0.32).
    os._exit(code)
