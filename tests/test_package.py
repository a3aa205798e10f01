"""What importing and installing the package gives, with and without MLX."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pion_vllm_mlx
from pion_vllm_mlx import config
from pion_vllm_mlx.errors import ConfigError

# Makes mlx and mlx_lm as absent as on a machine where nobody installed them.
WITHOUT_MLX = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "mlx_lm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_importing_the_package_imports_neither_mlx_nor_mlx_lm() -> None:
    result = run_python(
        "import sys, pion_vllm_mlx, pion_vllm_mlx.errors, pion_vllm_mlx.config, pion_vllm_mlx.cli\n"
        "import pion_vllm_mlx.cache.data_folder\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_package_imports_without_mlx_and_names_what_is_missing_when_used() -> None:
    result = run_python(
        WITHOUT_MLX + "import pion_vllm_mlx\n"
        "assert pion_vllm_mlx.PionError\n"
        "try:\n"
        "    pion_vllm_mlx.PionPromptCache(object()).get_or_prefill([1, 2], namespace='n')\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert "mlx" in result.stdout
    assert "pip install 'pion-vllm-mlx[mlx]'" in result.stdout


@pytest.mark.parametrize("name", pion_vllm_mlx.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(pion_vllm_mlx, name) is not None
    assert name in dir(pion_vllm_mlx)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PionNothing'"):
        _ = pion_vllm_mlx.PionNothing  # type: ignore[attr-defined]


def test_the_installed_version_is_the_one_the_package_says() -> None:
    try:
        installed = metadata.version("pion-vllm-mlx")
    except metadata.PackageNotFoundError:
        pytest.skip("the package runs from its source folder")
    assert installed == pion_vllm_mlx.__version__


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(pion_vllm_mlx.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("PION_PROMPT_CACHE_NO_INPROC", "no_inproc"),
        ("PION_PROMPT_CACHE_NO_BINARY", "no_binary"),
        ("PION_PROMPT_CACHE_NO_BATCH", "no_batch"),
        ("PION_PROMPT_CACHE_NO_EXPORT", "no_export"),
        ("PION_PROMPT_CACHE_NO_EXPORT", "no_mapped"),
        ("PION_DISABLE_FUSED_ATTEND", "no_fused_attend"),
        ("PION_NO_EXPLICIT_EVAL", "no_explicit_eval"),
        ("PION_DEBUG_SPARSE_AUTO", "debug_sparse_auto"),
    ],
)
def test_each_switch_is_read_when_asked_and_off_by_default(
    monkeypatch: pytest.MonkeyPatch, variable: str, field: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert getattr(config.ClientSwitches.from_environment(), field) is False
    monkeypatch.setenv(variable, "1")
    assert getattr(config.ClientSwitches.from_environment(), field) is True
    monkeypatch.setenv(variable, "0")
    assert getattr(config.ClientSwitches.from_environment(), field) is False


def test_lineage_is_on_unless_it_is_switched_off() -> None:
    assert config.ClientSwitches.from_environment({}).lineage
    assert not config.ClientSwitches.from_environment({"PION_LINEAGE": "0"}).lineage


def test_an_empty_password_or_export_folder_counts_as_none() -> None:
    empty = config.ServerEnvironment.from_environment(
        {"PION_REQUIREPASS": "", "PION_EXPORT_DIR": ""}
    )
    assert empty == config.ServerEnvironment(None, None)
    given = config.ServerEnvironment.from_environment(
        {"PION_REQUIREPASS": "secret", "PION_EXPORT_DIR": "exports"}
    )
    assert given == config.ServerEnvironment("secret", Path("exports"))


def test_the_data_and_model_folders_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PION_DATA_DIR", raising=False)
    monkeypatch.delenv("PION_MODEL_DIR", raising=False)
    assert config.APP_NAME in str(config.data_dir())
    assert config.data_dir() != config.model_dir()
    monkeypatch.setenv("PION_DATA_DIR", "~/prefixes")
    monkeypatch.setenv("PION_MODEL_DIR", "/models")
    assert config.data_dir() == Path.home() / "prefixes"
    assert config.model_dir() == Path("/models")


def test_the_embedded_disk_budget_is_a_share_of_what_is_free_up_to_the_cap(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    small_cap = config.EmbeddedDefaults(disk_budget_cap_bytes=1)
    assert small_cap.disk_budget_bytes(folder) == 1
    no_cap = config.EmbeddedDefaults(disk_budget_cap_bytes=10**30)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0.05 * free < no_cap.disk_budget_bytes(folder) < 0.2 * free


def test_the_embedded_disk_budget_always_holds_what_the_folder_has(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "rows").write_bytes(bytes(1 << 20))
    nothing_free = config.EmbeddedDefaults(disk_budget_share=0.0)
    assert 1 << 20 <= nothing_free.disk_budget_bytes(tmp_path) < 2 << 20
    assert nothing_free.disk_budget_bytes(tmp_path / "empty") == 1  # 0 would be no limit


def test_the_socket_folder_is_private_and_its_paths_are_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = config.socket_dir(name_bytes=8)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(os.fsencode(folder)) + 1 + 8 <= config.MAX_SOCKET_PATH_BYTES

    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert long not in config.socket_dir().parents


def test_a_socket_folder_that_others_may_enter_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    open_to_all = tmp_path / f"pion-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert config.socket_dir() != open_to_all
    monkeypatch.setattr(config, "_socket_parents", lambda: [tmp_path])
    with pytest.raises(ConfigError, match="others may write"):
        config.socket_dir(name_bytes=8)
