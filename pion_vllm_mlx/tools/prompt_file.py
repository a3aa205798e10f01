"""``pion-vllm-mlx export NS FILE`` and ``import FILE``: prefixes as mlx-lm's own cache files.

The file is what ``mlx_lm.models.cache.save_prompt_cache`` of the installed version writes;
``load_prompt_cache`` of the same version reads it. Its metadata keeps the namespace and the
completion record, so that an import makes the very same prefix a hit again. An import
proves every row and state against that record before it stores anything; a file that does
not fit is refused. mlx-lm writes room for more rows along with them, of which the record says
nothing: checksums of the whole arrays tell damage there, too.

A storage format that does not encode decoded rows back to the same codes cannot be proved
so: its prefix is exported without a record, for mlx-lm alone.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from crc32c import crc32c
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from pion_vllm_mlx.cache.completion import CompletionRecord, Run
from pion_vllm_mlx.cache.lanes import RowSource, Wanted, load_states, load_stored
from pion_vllm_mlx.cache.lanes_codec import encode_rows
from pion_vllm_mlx.cache.layers import StoredCache, dismantle, rebuild
from pion_vllm_mlx.cache.leaf import ArraySpec, LeafRows, LeafSpec, dtype_of
from pion_vllm_mlx.cache.prompt_cache_store import Prefix, write_prefix
from pion_vllm_mlx.cache.slots_state import encode_state
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.errors import ConfigError, DamagedData, UnsupportedCache
from pion_vllm_mlx.formats import get_format
from pion_vllm_mlx.tools.cut_file import cut_short
from pion_vllm_mlx.tools.store_access import add_url, size_text, store

SUFFIX = ".safetensors"
RECORD_KEY, NAMESPACE_KEY, WRITER_KEY = "pion_completion", "pion_namespace", "pion_mlx_lm"
ARRAYS_KEY = "pion_arrays"
"""JSON: the CRC32C of every array of the file by its name there."""

#: what safetensors itself allows
_MOST_HEADER_BYTES = 100_000_000
_NOT_A_FILE_OF_OURS = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError
)  # fmt: skip
"""What mlx and mlx-lm raise for a file that is damaged, or of another kind or version."""


def export_main(arguments: Sequence[str]) -> int:
    """Write one prefix to a file."""
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx export", description="Writes a stored prefix as a file of mlx-lm."
    )
    parser.add_argument("namespace")
    parser.add_argument("file", type=Path, help=f"a name that ends with {SUFFIX}")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    add_url(parser)
    options = parser.parse_args(arguments)
    if options.file.suffix != SUFFIX:
        raise ConfigError(f"{options.file}: mlx-lm needs a name that ends with {SUFFIX}")
    if options.file.exists() and not options.force:
        raise ConfigError(f"{options.file} exists; --force replaces it")
    with store(options, start=True) as access:
        record, cache = load(access.client, options.namespace)
    try:
        whole = write_file(options.file, options.namespace, record, cache)
    except OSError as error:
        raise ConfigError(f"{options.file} cannot be written: {error.strerror}") from error
    what = f"{record.ids.size:,} tokens, {size_text(options.file.stat().st_size)}"
    print(f"{options.namespace}: {what} written to {options.file}")
    if not whole:
        formats = ", ".join(sorted({run.format for run in record.runs}))
        print(f"rows stored as {formats} are for mlx-lm alone: import will refuse the file")
    return 0


def import_main(arguments: Sequence[str]) -> int:
    """Store the prefix of a file."""
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx import", description="Stores a prefix that export has written."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--namespace", help="another one than it was exported from")
    parser.add_argument("--force", action="store_true", help="replace another prefix there")
    add_url(parser)
    options = parser.parse_args(arguments)
    namespace, record, stored = read_file(options.file)
    namespace = options.namespace or namespace
    with store(options, start=True) as access:
        there = access.client.record(namespace)
        if there == record.encode():
            print(f"{namespace}: these {record.ids.size:,} tokens are stored already")
            return 0
        if there is not None and not options.force:
            raise ConfigError(f"{namespace} holds another prefix; --force replaces it")
        prefix = Prefix(
            namespace, record.ids, record.identity, stored, _leaves(record), record.prefill_ms
        )
        sent = write_prefix(access.client, prefix, drop_first=True)
        access.client.publish(namespace)
    print(f"{namespace}: {record.ids.size:,} tokens stored, {size_text(sent)}")
    return 0


def load(client: StoreClient, namespace: str) -> tuple[CompletionRecord, list[Any]]:
    """The record and the filled cache of a namespace, every byte verified.

    Raises DamagedData, NewerFormat, ConfigError where no whole prefix is stored, and what
    the client raises.
    """
    blob = client.record(namespace)
    if blob is None:
        raise ConfigError(f"{namespace}: no whole prefix is stored under this namespace")
    record = CompletionRecord.decode(blob)
    wanted = Wanted(namespace, record, None)
    arrays = load_stored(client, wanted)
    dtypes = {(spec.layer, spec.side): dtype_of(spec.dtype) for spec in _specs(record.slots)}
    rows = RowSource(arrays, dtypes)
    return record, rebuild(record.slots, rows.fetch, load_states(client, wanted))


def write_file(path: Path, namespace: str, record: CompletionRecord, cache: list[Any]) -> bool:
    """Write a cache with its record; whether an import will take it.

    The file is complete and read back, or not there. Raises UnsupportedCache, OSError.
    """
    whole = difference(record, dismantle(cache)) is None
    metadata = {NAMESPACE_KEY: namespace, WRITER_KEY: version("mlx-lm")}
    if whole:
        metadata[RECORD_KEY] = base64.b64encode(record.encode()).decode()
        metadata[ARRAYS_KEY] = json.dumps(_sums(cache))
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{SUFFIX}")
    try:
        # made by us first: a conversation is nobody else's to read
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            save_prompt_cache(str(temporary), cache, metadata)
            again = dismantle(_read(temporary)[0])
            changed = _changed_array(temporary, metadata)
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
            raise _not_kept(f"{error!r}") from error
        fault = (difference(record, again) or changed) if whole else None
        if fault is not None:
            raise _not_kept(fault)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return whole


def _not_kept(why: str) -> UnsupportedCache:
    return UnsupportedCache(f"a file of mlx-lm {version('mlx-lm')} cannot keep this cache: {why}")


def _read(path: Path) -> tuple[list[Any], Any]:
    """Cache and metadata of a file, as mlx-lm reads it. Raises what mlx-lm does."""
    cache, metadata = load_prompt_cache(str(path), return_metadata=True)  # type: ignore[no-untyped-call]
    return list(cache), metadata


def _sums(cache: list[Any]) -> dict[str, int]:
    """Checksums of the arrays that ``save_prompt_cache`` writes, by their names in the file."""
    state: Any = tree_flatten([one.state for one in cache])
    return {
        name: _sum(value if isinstance(value, mx.array) else mx.array(value))
        for name, value in state
        if isinstance(value, mx.array | int | float)  # as mlx-lm makes arrays of them
    }


def _sum(array: mx.array) -> int:
    if not array.size:
        return crc32c(b"")
    return crc32c(np.asarray(array.reshape(-1).view(mx.uint8)).tobytes())


def _changed_array(path: Path, metadata: dict[str, Any]) -> str | None:
    """Which array of a readable file is not as it was written; None if all are.

    Files of before there were checksums of arrays have none: nothing is wrong with them.
    """
    try:
        wanted = dict(json.loads(metadata.get(ARRAYS_KEY, "{}")))
        arrays: Any = mx.load(str(path))
        for name, sum_ in wanted.items():
            if _sum(arrays[name]) != sum_:
                return f"array {name} is not what its checksum says"
    except (ValueError, TypeError, LookupError) as error:
        return f"its checksums are damaged: {error!r}"
    return None


def _writer(path: Path) -> str:
    """The version of mlx-lm that wrote a file of ours; empty where it does not say."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            metadata = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))["__metadata__"]
        # mlx-lm puts a number before the names
        return str(next(metadata[name] for name in metadata if name.endswith(WRITER_KEY)))
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return ""


def read_file(path: Path) -> tuple[str, CompletionRecord, StoredCache]:
    """Namespace, record and cache of a file that ``write_file`` wrote.

    Raises DamagedData for one that is damaged, or is not what its record says,
    ConfigError for one without a record, UnsupportedCache, NewerFormat.
    """
    try:
        cache, metadata = _read(path)
    except _NOT_A_FILE_OF_OURS as error:
        missing = cut_short(path) if path.is_file() else ""
        if missing:
            raise DamagedData(f"{path}: {missing}; copy it whole, or export it again") from error
        writer, here = _writer(path), version("mlx-lm")
        if writer not in ("", here):
            raise UnsupportedCache(
                f"{path} was written by mlx-lm {writer}, whose files mlx-lm {here}, which is "
                f"installed here, does not read: import it where {writer} is installed"
            ) from error
        raise DamagedData(f"{path} is no prompt cache that mlx-lm {here} reads: {error}") from error
    text = metadata.get(RECORD_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"{path} has no completion record: nothing proves which tokens and which model it is of"
        )
    try:
        record = CompletionRecord.decode(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise DamagedData(f"{path}: completion record: {error}") from error
    fault = _changed_array(path, metadata)
    if fault is None:
        stored = dismantle(cache)
        fault = difference(record, stored)
    if fault is not None:
        raise DamagedData(f"{path}: {fault}")
    return str(metadata.get(NAMESPACE_KEY, "")), record, stored


def difference(record: CompletionRecord, stored: StoredCache) -> str | None:
    """In what a cache is not the one of the record; None when every byte is the same."""
    if json.dumps(stored.slots, sort_keys=True) != json.dumps(record.slots, sort_keys=True):
        return "its caches are not those of its completion record"
    try:
        leaves = _leaves(record)
        for run in record.runs:
            if crc32c(encode_rows(_part(stored, run), leaves[run.layer])) != run.crc:
                return f"rows of leaf {run.layer} {run.side} are not those of its completion record"
    except (LookupError, TypeError, ValueError) as error:
        return f"its rows are not those of its completion record: {error!r}"
    if {state.slot for state in record.states} != set(stored.states):
        return "its recurrent states are not those of its completion record"
    for state in record.states:
        if crc32c(encode_state("ArraysCache", stored.states[state.slot])) != state.crc:
            return f"the state of slot {state.slot} is not that of its completion record"
    return None


def _part(stored: StoredCache, run: Run) -> LeafRows:
    """The rows of one run. Raises LookupError where the cache does not have them."""
    for rows in stored.rows:
        first = run.start - rows.start
        if (rows.layer, rows.side) == (run.layer, run.side) and 0 <= first < rows.count:
            if first + run.rows <= rows.count:
                return rows.part(first, run.rows)
    raise LookupError(f"leaf {run.layer} {run.side}: no rows from token {run.start} on")


def _leaves(record: CompletionRecord) -> list[LeafSpec]:
    """The leaves of a record, in the formats and layouts of its runs."""
    layouts = {run.layer: run.layout for run in record.runs}
    leaves = []
    for layer, leaf in enumerate(record.leaves):
        heads, width = int(leaf["heads"]), int(leaf["k"]) or int(leaf["v"])
        could = get_format(str(leaf["format"])).head_major(width, heads)
        leaves.append(
            LeafSpec(
                layer,
                heads,
                str(leaf["format"]),
                int(leaf["k"]),
                int(leaf["v"]),
                str(leaf.get("v_format", "")),
                token_major=could and layouts.get(layer) == "NHD",
            )
        )
    return leaves


def _specs(slots: list[dict[str, Any]]) -> Iterator[ArraySpec]:
    for slot in slots:
        yield from _specs(slot.get("caches", []))
        yield from map(ArraySpec.from_json, slot.get("arrays", []))
