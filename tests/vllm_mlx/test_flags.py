"""Flags of vllm-mlx reach it, but for those with which no request would ever be answered."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.serve.engine_vllm_mlx import parse, with_application  # noqa: E402
from tests.serve.tiny_folder import make_folder  # noqa: E402

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-num-seqs", "0"),
        ("--prefill-batch-size", "0"),
        ("--completion-batch-size", "-1"),
        ("--stream-interval", "0"),
        ("--max-tokens", "0"),
        ("--max-request-tokens", "0"),
        ("--chunked-prefill-tokens", "-1"),
        ("--cache-memory-mb", "-5"),
        ("--cache-memory-percent", "1.5"),
        ("--gpu-memory-utilization", "7"),
        ("--timeout", "0"),
        ("--default-temperature", "nan"),
        ("--default-top-p", "1.1"),
        ("--default-min-p", "-0.1"),
        ("--default-top-k", "-2"),
        ("--default-presence-penalty", "nan"),
        ("--default-thinking-token-budget", "-1"),
    ],
)
def test_a_flag_with_which_no_request_is_answered_is_refused_by_its_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["some/model", f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"error: {flag} must be at least" in capsys.readouterr().err


def test_the_ends_of_the_ranges_are_taken() -> None:
    words = ["--max-num-seqs=1", "--cache-memory-mb=0", "--cache-memory-percent=1"]
    words += ["--default-top-p=0", "--chunked-prefill-tokens=0", "--default-temperature=0"]
    assert parse(["some/model", *words]).serve.max_num_seqs == 1


def test_flags_that_lack_the_model_they_speak_of_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["some/model", "--specprefill"])
    assert ended.value.code == 2
    assert "--specprefill wants --specprefill-draft-model" in capsys.readouterr().err
    assert parse(["some/model", "--specprefill", "--specprefill-draft-model", "d"])


def test_a_bare_durable_leaves_the_model_behind_it_alone() -> None:
    parsed = parse(["--durable", "01-ai/model", "--max-num-seqs=3"])
    assert (parsed.pion.durable_tokens, parsed.model) == (64, "01-ai/model")
    parsed = parse(["--durable", "9", "some/model"])
    assert (parsed.pion.durable_tokens, parsed.model) == (9, "some/model")


#: serve's own, or always the same under it
OURS = {"--help", "--host", "--port", "--api-key", "--continuous-batching"}
#: what prefixes are kept in is not vllm-mlx's to choose
REFUSED = {"--use-paged-cache", "--no-memory-aware-cache", "--ssd-cache-dir"}
#: nothing else is to be had, and nothing kept where ``serve`` asks for that itself
CONSTANT = {"--enable-prefix-cache", "--disable-prefix-cache"}
#: values of those that take no number, and what others they want beside them
VALUES = {
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
    "--models-config": "models.yaml",
    "--gpu-memory-utilization": "0.5",
}
DRAFT = ["--mllm", "--mllm-draft-model", "d", "--mllm-draft-kind", "mtp"]
BESIDE = {
    "--memory-budget-gb": ["--models-config", "m.yaml"],
    "--max-request-tokens": ["--max-tokens", "5"],
    "--enable-auto-tool-choice": ["--tool-call-parser", "qwen"],
    "--tool-call-parser": ["--enable-auto-tool-choice"],
    "--specprefill": ["--specprefill-draft-model", "d"],
    "--mllm-draft-model": ["--mllm", "--mllm-draft-kind", "mtp"],
    "--mllm-draft-kind": DRAFT[:3],
    "--mllm-draft-block-size": DRAFT,
    "--default-mllm-draft": DRAFT,
}


def serve_flags() -> list[Any]:
    """The flags of vllm-mlx's own serve command."""
    from vllm_mlx.cli import create_parser

    for action in create_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = action.choices["serve"]._actions
    return [one for one in flags if one.option_strings]


def value_of(flag: Any) -> list[str]:
    """A value that is not the default, as a word of the command line; none of a switch."""
    name = flag.option_strings[-1]
    if flag.nargs == 0:
        return []
    if flag.choices:
        return [str(next(one for one in flag.choices if one not in (flag.default, "auto")))]
    if name in VALUES:
        return [VALUES[name]]
    return ["0.7"] if flag.type is float else ["word"] if flag.type is str else ["7"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Json]]:
    """What vllm-mlx's own serve command makes of words: all that its server and engine are told.

    Nothing is loaded; its settings are those of before when the test is over.
    """
    from vllm_mlx import server
    from vllm_mlx.utils import download

    model = make_folder(tmp_path / "model")
    told: Json = {}

    def noted(name: str) -> Callable[..., Any]:
        def note(*given: Any, **options: Any) -> Any:
            told.update({f"{name}{at}": one for at, one in enumerate(given)})
            told.update(options)
            for config in ("scheduler_config", "config", "defaults"):
                told.update(vars(options.get(config) or argparse.Namespace()))
            return model if name == "download" else None

        return note

    for name in ("load_model", "load_model_registry", "load_embedding_model"):
        monkeypatch.setattr(server, name, noted(name))
    monkeypatch.setattr(server, "load_reranker_model", noted("rerank"))
    monkeypatch.setattr(download, "ensure_model_downloaded", noted("download"))
    monkeypatch.setenv("VLLM_MLX_MCP_CONFIG", "")
    before = dict(vars(server))

    def run(*words: str) -> Json:
        told.clear()
        named = [] if "--models-config" in words else [str(model)]
        with_application(parse([*named, *words]), lambda app, **options: None)
        found = {name: one for name, one in vars(server).items() if name not in ("app",)}
        found = {**found, **told, "env": os.environ["VLLM_MLX_MCP_CONFIG"]}
        vars(server).update(before)
        return found

    yield run
    vars(server).update(before)


@pytest.mark.parametrize("flag", serve_flags(), ids=lambda flag: flag.option_strings[-1])
def test_every_flag_of_vllm_mlx_reaches_its_server_and_engine_as_without_us(
    flag: Any, command: Callable[..., Json]
) -> None:
    name, words = flag.option_strings[-1], value_of(flag)
    if name in OURS:
        return
    if name in REFUSED:
        with pytest.raises(SystemExit):
            parse(["some/model", name, *words])
        return
    beside = BESIDE.get(name, [])
    parsed = parse([*([] if "models" in f"{name}{beside}" else ["m"]), name, *words, *beside])
    wanted = vars(parsed.serve)[flag.dest]
    if name in CONSTANT:
        return
    assert wanted != flag.default
    plain = command(*([] if name in ("--tool-call-parser", *DRAFT) else beside))
    told = command(name, *words, *beside)
    changed = [one for key, one in told.items() if one != plain.get(key)]
    assert any(_is(one, wanted) for one in changed), (name, changed)


def _is(told: Any, wanted: Any) -> bool:
    """Whether a setting is what a flag says, in whatever unit."""
    if isinstance(wanted, bool):
        return isinstance(told, bool)
    megabytes = isinstance(wanted, int) and told == wanted << 20
    parser = type(told).__name__.lower().startswith(str(wanted))
    held = type(told).__module__.startswith("vllm_mlx") and wanted in vars(told).values()
    return bool(told == wanted or megabytes or parser or held)
