"""What an engine process needs to be run by the front, and what it owes it.

The front starts ``python -m MODULE`` with the flags of ``add_link_flags``, ``--log-level``, those
of ``pion_flags.add_pion_flags`` and whatever serve itself did not know, in a session of its own
(Ctrl-C in the terminal reaches the front alone).  An engine

1. calls ``watch_lifeline`` before it loads anything: it then ends when the front has gone, by
   whatever death;
2. listens on 127.0.0.1, on a port that the system chooses, with a backlog of at least 128;
3. calls ``report_ready`` once ``/health`` may be asked;
4. ends on SIGTERM within ``STOP_SECONDS``, or it is killed;
5. answers only requests that ``authorized`` accepts, all others with 401.

==========================  ==================================================================
request                     answer
==========================  ==================================================================
POST /v1/chat/completions   OpenAI's; nearly always ``stream`` with ``include_usage``: so a
POST /v1/completions        client that leaves is noticed at the next write.  ``usage`` has
                            ``prompt_tokens_details.cached_tokens``.  A ``pion`` object (the
                            receipt) may stand in the body, or in the last or the usage chunk;
                            in the first, for the front alone, ``pion_prompt``: what usage will
                            say of the prompt (``prompt_tokens``, ``cached_tokens``).
                            ``reasoning`` or ``reasoning_content``; tool calls whole or in parts.
                            Comments (``: keepalive``) are passed on as signs of life.
                            The model is always ``default_model`` (vllm-mlx: the name reported)
GET /v1/models, /health     OpenAI's; /health is 200 when requests may come, else 503
GET /v1/pion/stats          a flat JSON object; ``{"pion": "disabled"}`` with ``--no-pion``
POST /v1/pion/count_tokens  a chat body -> ``{"input_tokens": n}``
POST /v1/pion/explain       a chat or completion body, or ``{}`` for the last miss -> a JSON object
errors                      a status and ``{"error": text}`` or ``{"error": {"message": text}}``
                            before the headers; after them a chunk ``data: {"error": …}``
==========================  ==================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pion_vllm_mlx import config

#: how long an engine may take to end after SIGTERM; what is left is killed.
STOP_SECONDS = 30.0
#: the exit code of a command whose flags are wrong.
WRONG_USE = 2


@dataclass(frozen=True)
class EngineLink:
    """The engine's side of its connection to the front.

    ``tenant`` is a digest of the front's API key, empty without one: a part of the key under
    which prefixes are stored.  Without descriptors (an engine started by hand) nothing is
    reported or watched; without ``key`` every request is accepted.  ``front_logs``: the front
    has a line a request in the log, with what the engine would say of it.
    """

    ready_fd: int | None = None
    lifeline_fd: int | None = None
    key: str = field(default="", repr=False)
    tenant: str = ""
    front_logs: bool = False


def add_link_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--ready-fd``, ``--lifeline-fd`` and ``--front-logs``, which people do not type."""
    parser.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--lifeline-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--front-logs", action="store_true", help=argparse.SUPPRESS)


def engine_link(options: argparse.Namespace) -> EngineLink:
    """The link that parsed flags and the environment describe."""
    secrets = config.EngineEnvironment.from_environment()
    return EngineLink(
        options.ready_fd, options.lifeline_fd, secrets.key, secrets.tenant, options.front_logs
    )


def leave_requests_to_front(link: EngineLink, *loggers: str) -> None:
    """Has these loggers, which have a line a request, say it at DEBUG only, if the front does."""
    for name in loggers if link.front_logs else ():
        if logging.getLogger().getEffectiveLevel() > logging.DEBUG:
            logging.getLogger(name).setLevel(logging.WARNING)


def take_link(arguments: Sequence[str]) -> tuple[EngineLink, list[str]]:
    """The link, and the arguments that are left."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_link_flags(parser)
    options, rest = parser.parse_known_args(list(arguments))
    return engine_link(options), rest


def authorized(link: EngineLink, authorization: str | None) -> bool:
    """Whether the value of a request's Authorization header carries the front's key."""
    if not link.key:
        return True
    expected = f"Bearer {link.key}".encode()
    return hmac.compare_digest((authorization or "").encode("utf-8", "replace"), expected)


def report_ready(link: EngineLink, port: int, model: str) -> None:
    """Tell the front where the engine listens, once; the pipe is closed then.

    A front that has gone meanwhile is the lifeline's business.
    """
    if link.ready_fd is None:
        return
    line = json.dumps({"port": port, "model": model}) + "\n"
    with (
        contextlib.suppress(BrokenPipeError),
        os.fdopen(link.ready_fd, "wb", buffering=0) as pipe,
    ):
        pipe.write(line.encode())


def watch_lifeline(link: EngineLink, on_end: Callable[[], None] | None = None) -> None:
    """End this process at once when the front has gone, whatever else it is doing.

    ``on_end`` runs first, on the watching thread; it must not take long.
    """
    descriptor = link.lifeline_fd
    if descriptor is None:
        return
    # Processes that the engine starts must not hold the front's pipe for it.
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        while os.read(descriptor, 64):
            pass
        if on_end is not None:
            on_end()
        os._exit(1)

    threading.Thread(target=watch, name="pion-lifeline", daemon=True).start()
