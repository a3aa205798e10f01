"""No process that is started runs what lies in the working folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pion_vllm_mlx import __version__, config
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.errors import PionError
from tests.conftest import START_SECONDS, free_port_block

#: of the standard library, and of what the package needs.
SHADOWS = ("queue", "json", "numpy", "crc32c", "tokenizers", "mlx_lm", "uvicorn")
COMMANDS = {"as here": config.module_command, "by hand": lambda name: [*BY_HAND, name]}
BY_HAND = [sys.executable, "-c", config._RUN_MODULE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder full of modules that nobody should import."""
    found = tmp_path / "project"
    found.mkdir()
    for name in SHADOWS:
        (found / f"{name}.py").write_text("raise RuntimeError('of the working folder')\n")
    return found


@pytest.mark.parametrize("how", COMMANDS)
def test_a_module_is_run_with_its_words_and_without_the_working_folder(
    how: str, folder: Path
) -> None:
    done = subprocess.run(
        [*COMMANDS[how]("pion_vllm_mlx"), "--version"],
        cwd=folder,
        env=config.module_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and __version__ in done.stdout, done.stderr


def test_the_workers_of_a_server_come_up_there(folder: Path, tmp_path: Path) -> None:
    port = free_port_block()
    data = tmp_path / "data"
    words = ["server", "--kvcache", "-p", str(port), "--dir", str(data)]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*config.module_command("pion_vllm_mlx"), *words, "-w", "2", "--independent-workers"],
            cwd=folder,
            env=config.module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        given_up = time.monotonic() + START_SECONDS
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < given_up, log.read_text()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, log.read_text()
    assert "RuntimeError" not in log.read_text()


def test_serve_its_engine_and_its_store_come_up_there(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from pion_vllm_mlx.serve import options
    from tests.serve.front import running_front
    from tests.serve.tiny_folder import make_folder

    model = make_folder(tmp_path / "llama")
    engine = options.ENGINES["mlx-lm"].module
    with running_front(tmp_path, "--model", str(model), engine=engine, cwd=folder) as front:
        body = {"prompt": "hello " * 20, "max_tokens": 2}
        assert front.request("/v1/completions", body)[0] == 200
        assert front.request("/v1/pion/stats")[1]["kept"]
        assert front.stop() == 0
    assert "RuntimeError" not in front.output()


def test_the_flags_of_an_engine_are_told_there(folder: Path) -> None:
    pytest.importorskip("mlx_lm")
    done = subprocess.run(
        [*config.module_command("pion_vllm_mlx"), "serve", "--help"],
        cwd=folder,
        env=config.module_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "--draft-model" in done.stdout, done.stdout[-500:]


def _answers(port: int) -> bool:
    connection = RespConnection(Address("127.0.0.1", port))
    try:
        return bool(connection.command("PING") == "PONG")
    except (PionError, OSError):
        return False
    finally:
        connection.close()
