"""serve's command line: its own flags, and everything else for the engine."""

from __future__ import annotations

import argparse
import ipaddress
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from pion_vllm_mlx import config
from pion_vllm_mlx.serve.engine_process import EngineCommand
from pion_vllm_mlx.serve.gate import Door, tenant_of
from pion_vllm_mlx.serve.model_path import why_no_model
from pion_vllm_mlx.serve.pion_flags import (
    PionFlags,
    add_pion_flags,
    add_serve_flags,
    number_of,
    spare_model,
)

DEFAULT_PORT = 8080
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_HELP_SECONDS = 60.0


@dataclass(frozen=True)
class Engine:
    """An engine that can be chosen: its module, the package it needs, the extra that brings it.

    ``asked_by_name``, ``logprobs``, ``steers``: see ``EngineCommand``.
    """

    module: str
    package: str
    extra: str
    asked_by_name: bool = False
    logprobs: bool = True
    steers: bool = False


ENGINES = {
    "mlx-lm": Engine("pion_vllm_mlx.serve.engine_mlx_lm", "mlx_lm", "mlx"),
    "vllm-mlx": Engine(
        "pion_vllm_mlx.serve.engine_vllm_mlx",
        "vllm_mlx",
        "vllm-mlx",
        asked_by_name=True,
        logprobs=False,
        steers=True,
    ),
}


@dataclass(frozen=True)
class ServeOptions:
    """What serve was asked to do. ``unload_after`` is in seconds, None for never."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    engine: str = "mlx-lm"
    api_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()
    log_level: str = "INFO"
    unload_after: float | None = None
    normalize: bool = True
    media_urls: bool = False
    pion: PionFlags = PionFlags()
    engine_arguments: tuple[str, ...] = ()

    @property
    def door(self) -> Door:
        """Who may come in."""
        return Door(self.api_key, self.allowed_origins)

    def command(self, module: str | None = None) -> EngineCommand:
        """How to start the engine; ``module``: another than the chosen one's."""
        words = ["--log-level", self.log_level, *self.pion.to_arguments(), *self.engine_arguments]
        engine = ENGINES[self.engine]
        return EngineCommand(
            module or engine.module,
            tuple(words),
            tenant_of(self.api_key),
            self._model(),
            engine.asked_by_name,
            engine.logprobs,
            engine.steers,
        )

    def _model(self) -> str:
        """What the engine's flags call the model, as far as that is plain."""
        return model_named(self.engine_arguments) or "default_model"


def model_named(words: Sequence[str]) -> str | None:
    """The value of ``--model`` among an engine's flags; None where it is not plain."""
    return _value_of("--model", words)


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def build_parser() -> argparse.ArgumentParser:
    """The parser of serve's own flags; ``--help`` is handled apart, see ``print_help``."""
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx serve",
        usage="%(prog)s [flags] [the engine's flags]",
        description="OpenAI- and Anthropic-compatible endpoints over a local model, whose "
        "prompt cache survives restarts. Flags that are not listed go to the engine.",
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("serving")
    group.add_argument("-h", "--help", action="store_true", help="this, and the engine's help")
    group.add_argument("--host", default="127.0.0.1", help="listen here (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"and here (default: {DEFAULT_PORT})"
    )
    group.add_argument(
        "--engine", choices=tuple(ENGINES), default="mlx-lm", help="what runs the model"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must send, as a bearer token or x-api-key (default: $PION_API_KEY, "
        "which other users of this machine cannot see)",
    )
    group.add_argument(
        "--allowed-origins",
        type=_words,
        default=(),
        metavar="A,B",
        help="web pages that may ask, * for all (default: those served on this machine); without "
        "an --api-key also the names, beside this machine's own, under which serve may be reached",
    )
    group.add_argument(
        "--log-level", type=str.upper, choices=LOG_LEVELS, default="INFO", metavar="LEVEL"
    )
    group.add_argument(
        "--unload-after",
        type=_seconds,
        metavar="SECONDS",
        help="load the model on demand and stop it after so long without a request",
    )
    group.add_argument(
        "--no-normalize",
        action="store_true",
        help="keep per-session metadata lines of agents in system prompts",
    )
    group.add_argument(
        "--allow-media-urls",
        action="store_true",
        help="let requests have the engine fetch images from any URL that it can reach",
    )
    add_pion_flags(parser)
    add_serve_flags(parser)
    return parser


def parse(arguments: Sequence[str]) -> ServeOptions | None:
    """The options; None when only help was wanted, which has been printed.

    Exits with code 2 and a sentence for a wrong use, a host open to the network without an
    API key among them.
    """
    parser = build_parser()
    words = list(arguments)
    positional = _value_of("--engine", words) == "vllm-mlx"
    known, rest = parser.parse_known_args(spare_model(words) if positional else words)
    if known.help:
        print_help(parser, ENGINES[known.engine])
        return None
    api_key = known.api_key if known.api_key is not None else config.serve_api_key()
    if api_key == "":
        parser.error("--api-key must not be empty")
    if api_key is None and not is_loopback(known.host):
        parser.error(f"--host {known.host} is open to the network: give an --api-key")
    _refuse_no_model(parser, known.engine, rest)
    named = _named_model(known.engine, rest)
    if named is not None and (why := why_no_model(named)) is not None:
        parser.error(why)
    if known.pion_attend:
        _refuse_beside_attend(parser, known, rest)
    return ServeOptions(
        host=known.host,
        port=known.port,
        engine=known.engine,
        api_key=api_key,
        allowed_origins=known.allowed_origins,
        log_level=known.log_level,
        unload_after=known.unload_after,
        normalize=not known.no_normalize,
        media_urls=known.allow_media_urls,
        pion=PionFlags.from_options(known),
        engine_arguments=tuple(rest),
    )


def _refuse_no_model(parser: argparse.ArgumentParser, engine: str, rest: Sequence[str]) -> None:
    """Exits with code 2 where nothing among the engine's words can be a model."""
    flags = {word.partition("=")[0] for word in rest}
    if engine == "mlx-lm" and "--model" not in flags:
        parser.error("name the model: --model PATH_OR_REPOSITORY")
    # The words behind vllm-mlx's flags may be a flag's or the model: it sees to those itself.
    words = [word for word in rest if not word.startswith("-")]
    if engine == "vllm-mlx" and not words and not flags & {"--model", "--models-config"}:
        parser.error("name the model: serve --engine vllm-mlx PATH_OR_REPOSITORY")


def _named_model(engine: str, rest: Sequence[str]) -> str | None:
    """What the engine's flags call the model; vllm-mlx has it in the first place."""
    if engine == "vllm-mlx":
        return rest[0] if rest and not rest[0].startswith("-") else None
    return model_named(rest)


def _refuse_beside_attend(
    parser: argparse.ArgumentParser, known: argparse.Namespace, rest: Sequence[str]
) -> None:
    """Exits with code 2 for what ``--pion-attend`` cannot be had with."""
    given = {word.partition("=")[0] for word in rest}
    wrong = sorted(given & {"--kv-bits", "--draft-model"})
    wrong += ["--no-pion"] if known.no_pion else []
    wrong += ["--engine vllm-mlx"] if known.engine == "vllm-mlx" else []
    wrong += ["--durable"] if known.durable else []
    if wrong:
        parser.error(f"--pion-attend does not go with {', '.join(wrong)}")


def print_help(parser: argparse.ArgumentParser, engine: Engine) -> None:
    """serve's flags first, then those of the engine's own server."""
    print(parser.format_help())
    print(f"flags of the engine ({engine.package}):\n", flush=True)
    try:
        asked = subprocess.run(
            [*config.module_command(engine.module), "--help"],
            env=config.module_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"  (cannot be asked: {error})")
        return
    if asked.returncode == 0:
        print(asked.stdout)
    else:
        print(f"  (needs {engine.package}: pip install 'pion-vllm-mlx[{engine.extra}]')")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; a name other than localhost is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _port(text: str) -> int:
    number = number_of(int, text, "port")
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError("a port is 0 to 65535")
    return number


def _seconds(text: str) -> float:
    number = number_of(float, text, "number of seconds")
    if number <= 0 or not math.isfinite(number):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
