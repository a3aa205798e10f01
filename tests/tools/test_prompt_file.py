"""Export and import: a file of mlx-lm itself that becomes the very same hit again."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from pion_vllm_mlx import PionPromptCache, cli
from pion_vllm_mlx.cache.layers import cache_arrays
from tests.conftest import RunningServer, running_server
from tests.models import tiny_model, token_ids
from tests.server.wire import Wire

COUNT = 40


@pytest.fixture(autouse=True)
def no_process_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process remembers must not stand in for the store."""
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_server(tmp_path_factory.mktemp("export") / "data") as one:
        yield one


def url(server: RunningServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


def filled(server: RunningServer, model: Any, ns: str, **settings: Any) -> tuple[list[Any], Any]:
    """The cache of a request, and the statistics of its object."""
    with PionPromptCache(model, url=url(server), **settings) as cache:
        return cache.get_or_prefill(token_ids(COUNT), ns), cache.stats()


def same(left: list[Any], right: list[Any], model: Any) -> bool:
    """Whether both continue bit for bit alike."""
    step = mx.array([token_ids(COUNT + 1)[-1:]])
    return bool(mx.array_equal(model(step, cache=left), model(step, cache=right)).item())


def drop(server: RunningServer, ns: str) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ask("KV.PREFIX.DROP", ns)
        assert wire.ask("KV.PREFIX.LOOKUP", ns) == "MISS"


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_next", "mamba", "deepseek_v3", "falcon_h1"]
)
def test_what_was_exported_is_a_hit_again_after_its_import(
    server: RunningServer, tmp_path: Path, family: str
) -> None:
    model, ns, file = tiny_model(family), f"{family}-there", tmp_path / "a.safetensors"
    filled(server, model, ns)
    stored, first = filled(server, model, ns)
    assert first["hits"] == 1
    assert cli.main(["export", ns, str(file), "--url", url(server)]) == 0
    drop(server, ns)
    assert cli.main(["import", str(file), "--url", url(server)]) == 0
    again, stats = filled(server, model, ns)
    assert stats["hits"] == 1 and stats["misses"] == 0, stats["last_miss_reason"]
    assert same(stored, again, model)
    # and under another name
    assert cli.main(["import", str(file), "--namespace", "other", "--url", url(server)]) == 0
    assert filled(server, model, "other")[1]["hits"] == 1
    drop(server, "other")


def test_the_file_is_one_of_mlx_lm_and_private(server: RunningServer, tmp_path: Path) -> None:
    model, file = tiny_model("llama", mx.bfloat16), tmp_path / "a.safetensors"
    stored, _ = filled(server, model, "plain")
    assert cli.main(["export", "plain", str(file), "--url", url(server)]) == 0
    loaded = load_prompt_cache(str(file))
    assert {a.dtype for a in cache_arrays(loaded)} >= {mx.bfloat16}
    assert same(stored, loaded, model)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_another_prefix_is_neither_overwritten_in_a_file_nor_in_the_store(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    filled(server, model, "one")
    with PionPromptCache(model, url=url(server)) as cache:
        cache.get_or_prefill(token_ids(9), "two")
    assert cli.main(["export", "one", str(file), "--url", url(server)]) == 0
    assert cli.main(["export", "one", str(file), "--url", url(server)]) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main(["import", str(file), "--url", url(server)]) == 0
    assert "stored already" in capsys.readouterr().out
    there = ["import", str(file), "--namespace", "two", "--url", url(server)]
    assert cli.main(there) == 1
    assert "another prefix" in capsys.readouterr().err
    assert cli.main([*there, "--force"]) == 0
    assert filled(server, model, "two")[1]["hits"] == 1


def test_a_file_that_cannot_be_written_is_named_in_one_line(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(server, tiny_model("llama"), "ns")
    file = tmp_path / "absent" / "a.safetensors"
    assert cli.main(["export", "ns", str(file), "--url", url(server)]) == 1
    assert f"{file} cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0, 5, 40, 0.5, -1])
def test_a_file_that_was_cut_short_is_named_with_what_is_missing(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: float
) -> None:
    filled(server, tiny_model("llama"), "ns")
    file, cut = tmp_path / "a.safetensors", tmp_path / "cut.safetensors"
    assert cli.main(["export", "ns", str(file), "--url", url(server)]) == 0
    data = file.read_bytes()
    cut.write_bytes(data[: int(kept * len(data)) if 0 < kept < 1 else int(kept)])
    assert cli.main(["import", str(cut), "--url", url(server)]) == 1
    err = capsys.readouterr().err
    assert f"{cut}: it is cut short: " in err and "copy it whole, or export it again" in err
    if kept in (0.5, -1):
        assert f"{cut.stat().st_size:,} of its {len(data):,} bytes are there" in err


def test_a_file_whose_rows_were_changed_is_refused(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    filled(server, model, "changed")
    assert cli.main(["export", "changed", str(file), "--url", url(server)]) == 0
    drop(server, "changed")
    content = file.read_bytes()
    header = int.from_bytes(content[:8], "little")
    places = json.loads(content[8 : 8 + header])
    name = next(n for n, t in places.items() if n != "__metadata__" and len(t["shape"]) == 4)
    at = 8 + header + places[name]["data_offsets"][0]
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert cli.main(["import", str(file), "--url", url(server)]) == 1
    assert "is not what its checksum says" in capsys.readouterr().err
    file.write_bytes(content[: len(content) // 2])
    assert cli.main(["import", str(file), "--url", url(server)]) == 1
    drop(server, "changed")  # nothing was stored


def test_a_cache_file_without_a_record_is_refused(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    cache = make_prompt_cache(model)
    model(mx.array([token_ids(8)]), cache=cache)
    save_prompt_cache(str(file), cache, {"model": "x"})
    assert cli.main(["import", str(file), "--url", url(server)]) == 1
    assert "no completion record" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "none.safetensors"), "--url", url(server)]) == 1
    assert cli.main(["export", "nobody", str(tmp_path / "b.safetensors"), "--url", url(server)])
    assert "no whole prefix" in capsys.readouterr().err
    assert cli.main(["export", "nobody", str(tmp_path / "b.txt"), "--url", url(server)]) == 1
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    "settings", [{"vquant": "int8"}, {"vquant": "fp8"}, {"vquant": "int8", "boundary_protect": 1}]
)
def test_a_lossy_format_comes_back_as_it_was_or_is_refused(
    server: RunningServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    ns = "lossy" + "-".join(map(str, settings.values()))
    filled(server, model, ns, **settings)
    stored, _ = filled(server, model, ns, **settings)
    assert cli.main(["export", ns, str(file), "--url", url(server)]) == 0
    assert same(stored, load_prompt_cache(str(file)), model)
    alone = "mlx-lm alone" in capsys.readouterr().out
    drop(server, ns)
    code = cli.main(["import", str(file), "--url", url(server)])
    assert code == (1 if alone else 0)
    if not alone:
        again, stats = filled(server, model, ns, **settings)
        assert stats["hits"] == 1 and same(again, load_prompt_cache(str(file)), model)


def test_a_file_of_another_mlx_lm_that_is_not_read_names_both_versions(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = tiny_model("llama"), tmp_path / "a.safetensors"
    filled(server, model, "elsewhere")
    assert cli.main(["export", "elsewhere", str(file), "--url", url(server)]) == 0
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    (name,) = (name for name in metadata if name.endswith("pion_mlx_lm"))
    here = metadata[name]
    # what a version writes that names its caches in another way
    kinds = next(name for name, text in metadata.items() if text.endswith("KVCache"))
    for writer in ("0.99.1", here):
        metadata[name], metadata[kinds] = writer, "CacheOfAnotherVersion"
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        assert cli.main(["import", str(file), "--url", url(server)]) == 1
        err = capsys.readouterr().err
        if writer == here:
            assert f"is no prompt cache that mlx-lm {here} reads" in err
        else:
            assert f"was written by mlx-lm 0.99.1, whose files mlx-lm {here}" in err
