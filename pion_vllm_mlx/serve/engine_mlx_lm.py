"""mlx-lm's server as the engine of ``serve``: ``python -m pion_vllm_mlx.serve.engine_mlx_lm``.

mlx-lm's own command line, model loading and continuous batching, with three names of
``mlx_lm.server`` replaced while it runs: ``run`` (which builds our generator, cache and handler
and speaks the protocol of ``engine_child``), ``stream_generate`` (requests that are not batched)
and ``_make_sampler`` (whose tokens carry what is to be copied).  Every seam is checked first
and refused by name when it differs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.errors import PionError
from pion_vllm_mlx.serve.engine_child import (
    EngineLink,
    leave_requests_to_front,
    report_ready,
    take_link,
    watch_lifeline,
)
from pion_vllm_mlx.serve.engine_flags import refuse_wrong_sizes, refuse_wrong_values
from pion_vllm_mlx.serve.pion_flags import PionFlags, take_pion_flags
from pion_vllm_mlx.serve.store_options import store_options

if TYPE_CHECKING:
    from pion_vllm_mlx.serve.attending import AttendingCache
    from pion_vllm_mlx.serve.lineage_cache import CacheLimits

log = logging.getLogger("pion_vllm_mlx.serve")

CLOSE_SECONDS = 15.0
#: the generation thread waits no longer than that for the interpreter, whoever else works.
SWITCH_SECONDS = 0.0005


def lineage_options(
    flags: PionFlags, link: EngineLink, cli: dict[str, Any]
) -> LineageOptions | None:
    """The settings of the store; None for ``--no-pion``. ``cli`` are mlx-lm's own flags."""
    options = store_options(flags, link)
    if options is None:
        return None
    return replace(
        options,
        kv_bits=cli.get("kv_bits"),
        kv_group_size=int(cli.get("kv_group_size") or 64),
        quantized_kv_start=int(cli.get("quantized_kv_start") or 0),
    )


def named_entries(words: Sequence[str], cli: dict[str, Any]) -> int | None:
    """mlx-lm's ``--prompt-cache-size`` where somebody gave it; its default suits few clients."""
    flags = (word.split("=")[0] for word in words)
    # argparse takes a beginning, too
    least, whole = "--prompt-cache-s", "--prompt-cache-size"
    named = any(flag.startswith(least) and whole.startswith(flag) for flag in flags)
    return int(cli["prompt_cache_size"]) if named else None


class Engine:
    """What stands in for ``mlx_lm.server.run``."""

    def __init__(self, link: EngineLink, flags: PionFlags) -> None:
        self._link = link
        self._flags = flags

    def run(self, host: str, port: int, model_provider: Any, **unused: Any) -> None:
        """Serves until SIGTERM; ``host`` and ``port`` are the front's business."""
        import mlx.core as mx

        from pion_vllm_mlx.serve.engine_mlx_lm_generator import Generator
        from pion_vllm_mlx.serve.engine_mlx_lm_http import Handler, Listening
        from pion_vllm_mlx.serve.engine_mlx_lm_single import SingleRequests
        from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache

        server: Any = importlib.import_module("mlx_lm.server")
        cli = vars(model_provider.cli_args)
        refuse_wrong_values(cli)
        group = mx.distributed.init()
        options = lineage_options(self._flags, self._link, cli)
        if group.size() > 1 and options is not None:
            log.warning("a model spread over %d processes is not stored", group.size())
            options = None
        limits = CacheLimits(named_entries(sys.argv, cli), cli.get("prompt_cache_bytes"))
        attending = self._attending(limits, cli) if self._flags.attend else None
        # an empty cache is false
        cache = LineageCache(options, limits) if attending is None else attending
        server.stream_generate = SingleRequests(
            server.stream_generate if attending is None else attending.stream_generate,
            cache,
            self._flags.durable_tokens,
        )
        server._make_sampler = cache.spread.carrying(server._make_sampler)
        generator = Generator(model_provider, cache, attending)
        if group.rank() != 0:
            generator.join()
            return
        Handler.link = self._link
        fingerprint = server.get_system_fingerprint()
        httpd = Listening(
            ("127.0.0.1", 0),
            lambda *args: Handler(generator, *args, system_fingerprint=fingerprint),
        )
        _stop_on_sigterm(httpd)
        _quiet_progress()
        leave_requests_to_front(self._link, log.name)
        watch_lifeline(self._link)
        report_ready(self._link, httpd.server_address[1], str(cli["model"] or ""))
        with httpd:
            httpd.serve_forever()
        generator.stop_and_join()
        cache.close(CLOSE_SECONDS)

    def _attending(self, limits: CacheLimits, cli: dict[str, Any]) -> AttendingCache:
        """The cache of ``--pion-attend``, over mlx-lm's own ``stream_generate``."""
        from pion_vllm_mlx.serve.attending import AttendingCache

        server: Any = importlib.import_module("mlx_lm.server")
        step = cli.get("prefill_step_size")
        return AttendingCache(limits, self._flags, self._link, server.stream_generate, step)


def _quiet_progress() -> None:
    """mlx-lm logs each step of a prefill; at INFO a request has one line, its plan's."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        return
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not str(record.msg).startswith("Prompt processing"))


def _stop_on_sigterm(httpd: Any) -> None:
    """SIGTERM, and Ctrl-C of an engine started by hand, end ``serve_forever``."""

    def stop(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=httpd.shutdown, daemon=True).start()  # it waits for the loop

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if importlib.util.find_spec("mlx_lm") is None:
        print("mlx-lm is not installed: pip install 'pion-vllm-mlx[mlx]'", file=sys.stderr)
        return 1
    from pion_vllm_mlx.serve.engine_mlx_lm_seams import check_seams

    link, rest = take_link(words)
    flags, rest = take_pion_flags(rest)
    try:
        check_seams()
    except PionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    server: Any = importlib.import_module("mlx_lm.server")
    server.run = Engine(link, flags).run
    refuse_wrong_sizes(server)
    sys.setswitchinterval(SWITCH_SECONDS)
    sys.argv = ["mlx_lm.server", *rest]
    server.main()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is stored and closed.  MLX's own thread-bound streams would abort the process
    # in its static destructors (0.32).
    os._exit(code)
