"""serve's command line: its own flags, the engine's, and what is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pion_vllm_mlx import cli
from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.serve import main, options
from pion_vllm_mlx.serve.gate import tenant_of
from pion_vllm_mlx.serve.pion_flags import take_pion_flags

MODEL = ["--model", "m"]


def parsed(*words: str) -> options.ServeOptions:
    found = options.parse([*MODEL, *words])
    assert found is not None
    return found


def test_flags_that_are_not_serves_go_to_the_engine() -> None:
    got = parsed("--temp", "0.5", "--no-resume", "--pion-budget-gb", "8", "--max-tokens", "9")
    assert got.engine_arguments == (*MODEL, "--temp", "0.5", "--max-tokens", "9")
    assert (got.pion.resume, got.pion.budget_gb) == (False, 8.0)
    assert (got.host, got.port, got.unload_after) == ("127.0.0.1", 8080, None)
    words = got.command().arguments
    assert words[:2] == ("--log-level", "INFO")
    assert words[-6:] == got.engine_arguments
    assert "--no-resume" in words


def test_durable_takes_a_number_or_none() -> None:
    assert parsed().pion.durable_tokens == 0
    assert parsed("--durable").pion.durable_tokens == 64
    assert parsed("--durable", "7").pion.durable_tokens == 7


@pytest.mark.parametrize("number", ["", "64", "=64", "=7"])
@pytest.mark.parametrize("engine", [["--engine", "vllm-mlx"], ["--engine=vllm-mlx"]])
def test_a_bare_durable_leaves_the_model_behind_it_alone(engine: list[str], number: str) -> None:
    durable = [f"--durable{number}"] if number[:1] in ("", "=") else ["--durable", number]
    found = options.parse([*engine, *durable, "some/model", "--max-num-seqs", "4"])
    assert found is not None
    assert found.pion.durable_tokens == int(number.strip("=") or 64)
    assert found.engine_arguments == ("some/model", "--max-num-seqs", "4")
    assert options.parse([*engine, "some/model", *durable]).pion == found.pion  # type: ignore[union-attr]


def test_all_that_is_stored_is_read_ahead_unless_told_otherwise() -> None:
    def preloaded(*words: str) -> int:
        flags = parsed(*words).pion
        again, rest = take_pion_flags(flags.to_arguments())
        assert again == flags
        assert not rest
        return flags.preload_bytes

    for budget in ("3", "0"):
        assert preloaded("--pion-budget-gb", budget) > 1 << 50
    assert preloaded("--pion-preload-gb", "0") == 0
    assert preloaded("--pion-preload-gb", "0.5") == 5 * 10**8


def test_attending_is_told_to_the_engine() -> None:
    assert not parsed().pion.attend and "--pion-attend" not in parsed().command().arguments
    assert "--pion-attend" in parsed("--pion-attend").command().arguments


def test_a_vllm_mlx_model_is_a_word_of_the_engines() -> None:
    found = options.parse(["--engine", "vllm-mlx", "M", "--continuous-batching"])
    assert found is not None
    assert found.engine_arguments == ("M", "--continuous-batching")


def test_a_storage_format_has_one_name() -> None:
    assert parsed("--pion-vquant", "INT8").pion.vquant == "int8"
    assert LineageOptions(vquant="INT8").vquant == "int8"
    for unknown in ("garbage", "raw:8", ""):
        with pytest.raises(ConfigError, match="format"):
            LineageOptions(vquant=unknown)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "::"], "--api-key"),
        (["--host", "example.org"], "--api-key"),
        (["--api-key", ""], "empty"),
        (["--port", "70000"], "port"),
        (["--pion-port", "0"], "port"),
        (["--unload-after", "0"], "--unload-after"),
        (["--unload-after", "nan"], "--unload-after"),
        (["--pion-budget-gb", "-1"], "--pion-budget-gb"),
        (["--pion-min-gain", "-1"], "--pion-min-gain"),
        (["--pion-vquant", "garbage"], "unknown format 'garbage' (known: fp16"),
        (["--pion-vquant", "raw:8"], "raw:8 is no format for prefixes"),
        (["--pion-attend", "--no-pion"], "--pion-attend does not go with --no-pion"),
        (["--pion-attend", "--durable"], "--durable"),
        (["--pion-attend", "--kv-bits=8"], "--kv-bits"),
        (["--pion-attend", "--draft-model", "d"], "--draft-model"),
        (["--pion-attend", "--engine", "vllm-mlx"], "--engine vllm-mlx"),
        (["--engine", "other"], "--engine"),
        (["--log-level", "loud"], "--log-level"),
        (["--port", "x"], "--port: 'x' is no port"),
        (["--unload-after", "x"], "--unload-after: 'x' is no number of seconds"),
        (["--pion-preload-gb", "x"], "--pion-preload-gb: 'x' is no number of gigabytes"),
        (["--durable", "x"], "--durable: 'x' is no whole number"),
        (["--model", ""], "the model has no name"),
        (["--model="], "the model has no name"),
    ],
)
def test_a_wrong_use_exits_2_and_says_why(
    words: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PION_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        options.parse([*words, *MODEL])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--temp", "0"], "--model"),
        (["--engine", "vllm-mlx"], "--engine vllm-mlx PATH"),
        (["--engine", "vllm-mlx", "--pion-budget-gb", "8"], "--engine vllm-mlx PATH"),
        (["--engine", "vllm-mlx", "--continuous-batching"], "--engine vllm-mlx PATH"),
    ],
)
def test_a_model_must_be_named(
    words: list[str], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "name the model" in said and how in said


@pytest.mark.parametrize("words", [["--models-config", "F"], ["--models-config=F"]])
def test_models_may_be_named_in_a_file_of_vllm_mlx_s(words: list[str]) -> None:
    found = options.parse(["--engine", "vllm-mlx", *words])
    assert found is not None
    assert found.engine_arguments == tuple(words)
    assert found.command().model == "default_model"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PION_API_KEY", raising=False)
    assert parsed("--host", host).api_key is None


def test_the_key_may_come_from_the_environment_and_opens_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PION_API_KEY", "secret")
    got = parsed("--host", "0.0.0.0")
    assert got.api_key == "secret"
    assert "secret" not in repr(got)
    assert "secret" not in " ".join(got.command().arguments)


def test_a_tenant_is_its_key_without_telling_it() -> None:
    assert parsed("--api-key", "a").command().tenant == tenant_of("a") != tenant_of("b")
    assert "a" * 8 not in tenant_of("a" * 8)
    assert parsed().command().tenant == ""


def test_help_shows_serves_flags_before_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("--pion-budget-gb") < shown.index("flags of the engine")
    for flag in ("--engine", "--api-key", "--unload-after", "--no-normalize", "--durable"):
        assert flag in shown.partition("flags of the engine")[0]


def test_an_engine_that_is_not_installed_is_advice_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = options.Engine("pion_vllm_mlx.serve.engine_mlx_lm", "no_such_package_here", "mlx")
    monkeypatch.setitem(options.ENGINES, "mlx-lm", missing)
    assert cli.main(["serve", *MODEL]) == 1
    assert "pip install 'pion-vllm-mlx[mlx]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_a_sentence_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with main.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main.run(parsed("--port", str(port))) == 1
    assert "cannot listen" in capsys.readouterr().err


def test_the_front_imports_no_mlx() -> None:
    code = (
        "import sys, pion_vllm_mlx.serve.main;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_translators_do_no_input_or_output() -> None:
    folder = Path(options.__file__).parent
    pure = ("pieces", "sse", "reply", "conversation", "normalize", "checks", "api_errors")
    for path in folder.glob("*.py"):
        if path.stem in pure or path.stem.endswith(("_request", "_reply")):
            tree = ast.parse(path.read_text())
            names = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            assert names <= {"abc", "json", "re", "time", "uuid"}, path.name
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await)], path.name
