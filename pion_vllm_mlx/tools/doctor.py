"""``pion-vllm-mlx doctor``: what a data folder holds, what is damaged, what would be repaired.

Nothing in the folder is changed, and no server may run on it meanwhile. The repair that
``pion-server --repair`` and the embedded server do at a start is run, on copies of the
small files and links to the large ones in a temporary folder; a portable copy that waits for
a start is unpacked there. Then every row and state is read and compared with its checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.data_folder import read_status
from pion_vllm_mlx.errors import ConfigError, DamagedData, DataFolderBusy, PionError
from pion_vllm_mlx.server.keyspace import recovery as keyspace_recovery
from pion_vllm_mlx.server.store import rows, snapshot
from pion_vllm_mlx.server.store.files import FileHandle, NotRegular, OpenFiles, is_foreign
from pion_vllm_mlx.server.store.findings import LAST_CHANGED, Finding, Kind
from pion_vllm_mlx.server.store.recovery import Paths, Recovered, Recovery
from pion_vllm_mlx.tools.doctor_prefixes import PrefixLine, prefixes
from pion_vllm_mlx.tools.store_access import size_text

SHOWN = 20


@dataclass
class Report:
    """What was found.

    ``repairs`` is what a start with ``--repair`` would do, and any other refuses; ``starts``
    what any start does. ``unknown`` is what cannot be told from what is there. ``workers``:
    whose files are there.
    """

    folder: Path
    workers: list[int] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    prefixes: list[PrefixLine] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """Check a folder; 0 when it is sound, 1 when something in it is damaged."""
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx doctor",
        description="Checks a data folder and changes nothing. Exit code 0: sound; 1: damaged, "
        "or it could not be checked.",
    )
    parser.add_argument("--dir", type=Path, help="the folder (default: the embedded server's)")
    parser.add_argument("--quick", action="store_true", help="do not read rows and states")
    parser.add_argument("--all", action="store_true", help="name every prefix")
    options = parser.parse_args(arguments)
    folder: Path = options.dir if options.dir is not None else config.data_dir()
    # recovery logs what it sets aside, and here nothing is
    logging.getLogger("pion_vllm_mlx.server").addHandler(logging.NullHandler())
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        with not_in_use(folder):
            report = check(folder, quick=options.quick)
    except OSError as error:
        where = folder if error.filename is None else error.filename
        raise ConfigError(f"it could not be checked: {where}: {error.strerror or error}") from error
    if not report.workers:
        raise ConfigError(f"{folder} holds no files of a store")
    lines = text(folder, report, everything=options.all)
    unread = ", rows and states were not read" if options.quick else ""
    print("\n".join([*lines, f"damaged{unread}" if report.damage else f"sound{unread}"]))
    return 1 if report.damage else 0


@contextlib.contextmanager
def not_in_use(folder: Path) -> Iterator[None]:
    """No server starts on the folder meanwhile. Raises DataFolderBusy when one runs."""
    with contextlib.ExitStack() as held:
        for path in (folder, folder / config.LOCK_NAME):
            try:
                lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # no server ever was here, or the folder is a copy
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                status = read_status(folder)
                down = ", ".join(map(str, status.down)) if status is not None else ""
                who = f"a server whose worker {down} is down" if down else "a server"
                busy = f"{folder} is in use by {who}: end it, then check"
                raise DataFolderBusy(busy) from None
        yield


def check(folder: Path, *, quick: bool) -> Report:
    """Look at every worker's files. Raises OSError for what cannot be read."""
    report = Report(folder, _workers(folder))
    for worker in report.workers:
        with tempfile.TemporaryDirectory(prefix="pion-doctor-") as name:
            _check_worker(folder, worker, Path(name), report, quick)
    aside = sorted(path.name for path in folder.glob("pion.*.damaged-*"))
    if aside:
        report.facts.append(f"set aside by a repair, to delete or to keep: {', '.join(aside)}")
    return report


def _workers(folder: Path) -> list[int]:
    pattern = re.compile(r"pion\.(?:vstore|ssm|segments|snapshot|wal)(?:\.wal)?\.(\d+)")
    found = (pattern.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in found if match})


def _check_worker(folder: Path, worker: int, shadow: Path, report: Report, quick: bool) -> None:
    paths = Paths(folder, worker)
    keys = keyspace_recovery.Paths(folder, worker)
    for path in (*paths.all_files(), keys.snapshot, keys.wal):
        if is_foreign(path):
            report.damage.append(f"{path.name} is not a regular file")
            report.repairs.append(f"{path.name} is set aside, what it names is not touched")
        elif path.exists():
            report.facts.append(f"{path.name}: {size_text(path.stat().st_size)}")
    segments = list(paths.segments.iterdir()) if paths.segments.is_dir() else []
    if segments:
        size = sum(path.lstat().st_blocks * 512 for path in segments)
        report.facts.append(f"{paths.segments.name}: {len(segments)} files, {size_text(size)}")
    portable = _is_portable(paths.vstore)
    _look_for_logs(paths, keys, report)
    _copy(paths, keys, shadow, portable)
    if portable:
        _unpack(paths.vstore, Paths(shadow, worker), report)
    for recover in (_recover_store, _recover_keys):
        try:
            recover(shadow, worker, report, quick)
        except PionError as error:  # a newer version's files: nothing can be said of the rest
            report.damage.append(str(error))


def _look_for_logs(paths: Paths, keys: keyspace_recovery.Paths, report: Report) -> None:
    """Say which logs are not there: a start makes all of them, unless it keeps none."""
    logs = (paths.vstore_wal, paths.ssm_wal, keys.wal)
    missing = [path.name for path in logs if not os.path.lexists(path)]
    held = [*paths.all_files(), keys.snapshot, keys.wal]
    if paths.segments.is_dir():
        held += paths.segments.iterdir()
    stored = any(path.exists() and path.stat().st_size for path in held)
    if stored and 0 < len(missing) < len(logs):
        report.damage += [f"{name} is missing: what it held is lost" for name in missing]
        report.starts += [f"{name} is made anew, empty" for name in missing]
    elif stored and missing and not _is_portable(paths.vstore):
        report.unknown.append(
            f"what was stored since the last save: {', '.join(missing)} are missing, as with "
            "--no-wal, or they were deleted"
        )
    elif missing:
        report.unknown.append(
            f"whether anything was stored: {', '.join(missing)} missing, all else empty, as where "
            "a first start was killed, or deleted"
        )


def _is_portable(path: Path) -> bool:
    """Whether a portable copy waits in the manifest's place."""
    return path.exists() and not is_foreign(path) and snapshot.is_portable(path)


def _unpack(path: Path, shadow: Paths, report: Report) -> None:
    """A portable copy as the next start has it. Raises ConfigError where there is no room."""
    report.notes.append(f"{path.name} is a portable copy: the next start unpacks it")
    try:
        snapshot.unpack_portable(shadow.vstore, shadow.segments, path)
    except PionError as error:
        report.damage.append(str(error))
        report.repairs.append(f"{path.name} is set aside")
    except OSError as error:
        raise ConfigError(
            f"{path.name} cannot be unpacked in {shadow.folder.parent}: {error.strerror}; TMPDIR "
            "names another folder"
        ) from error


def _copy(paths: Paths, keys: keyspace_recovery.Paths, shadow: Path, portable: bool) -> None:
    """The small files as copies, segments as links: what a repair does to them stays there."""
    for path in (*paths.all_files(), keys.snapshot, keys.wal):
        if portable and path == paths.vstore:
            continue
        if path.exists() and not is_foreign(path):
            shutil.copyfile(path, shadow / path.name)
    folder = shadow / paths.segments.name
    folder.mkdir()
    if paths.segments.is_dir():
        for path in paths.segments.iterdir():
            (folder / path.name).symlink_to(path.absolute())


class _ReadOnly(OpenFiles):
    """Segments opened for reading alone: a folder that may not be written can be checked."""

    def get(self, path: Path) -> FileHandle:
        try:
            # what was unpacked is no link
            return FileHandle(path.readlink() if path.is_symlink() else path, os.O_RDONLY)
        except (FileNotFoundError, NotRegular):
            return FileHandle.missing(path)


def _recover_store(shadow: Path, worker: int, report: Report, quick: bool) -> None:
    recovery = Recovery(Paths(shadow, worker), wal_enabled=True, salvage=True)
    recovery.folder.files = _ReadOnly()
    found = recovery.run()
    for note in found.notes:
        _sort(note, worker, report)
    state = found.state
    if not quick:
        _read_everything(found, report)
    _take_prefixes(prefixes(state), worker, report)
    states = sum(map(len, state.states.values()))
    row_bytes = sum(session.row_bytes() for session in state.sessions.values())
    whose = f"worker {worker}: " if len(report.workers) > 1 else ""
    report.facts.append(
        f"{whose}{len(state.sessions)} sessions, {size_text(row_bytes)} of rows, {states} states; "
        f"{found.vstore_replayed + found.ssm_replayed} records in logs since the last save"
    )


def _recover_keys(shadow: Path, worker: int, report: Report, quick: bool) -> None:
    found = keyspace_recovery.recover(keyspace_recovery.Paths(shadow, worker), False, True)
    for note in found.notes:
        _sort(note, worker, report)
    count = found.data.size(0)
    if count:
        report.facts.append(f"{count} plain keys")


def _sort(note: Finding, worker: int, report: Report) -> None:
    """What recovery found, as what is damaged, what would be done, and what is harmless."""
    name = note.name
    match note.kind:
        case Kind.SET_ASIDE:
            report.damage.append(note.reason)
            report.repairs.append(f"{name} is set aside, {note.kept.value}")
        case Kind.SKIPPED:
            report.damage.append(str(note))
        case Kind.MISSING:
            report.damage.append(str(note))
            report.starts.append(f"{name} is dropped")
        case Kind.LAST_CHANGED:
            report.damage.append(f"{name}: {LAST_CHANGED}")
            report.starts.append(f"the last record of {name} is cut off")
        case Kind.TORN:
            report.notes.append(
                f"{name}: torn end of {note.count} bytes: a write that was under way when the "
                "server was killed; after a power cut one that may have been acknowledged"
            )
            report.starts.append(f"the torn end of {name} is cut off")
        case Kind.ORPHANS:
            report.notes.append(f"{note.count} segment files that nothing names are there")
            report.starts.append("segment files that nothing names are deleted")
        case Kind.UNDELETED:
            report.notes.append(str(note))
        case Kind.SEGMENTS_ASIDE:
            what = f"{note.count} segment files that nothing names"
            if any(path.exists() for path in Paths(report.folder, worker).all_files()):
                report.repairs.append(f"{what} are set aside, not deleted")
            else:
                report.damage.append(f"{what} are there, and no log or snapshot that could")
                report.starts.append(f"{what} are set aside; one with --no-wal deletes them")


def _read_everything(found: Recovered, report: Report) -> None:
    """Compare rows and states with their checksums, sealed headers with theirs."""
    bad: dict[str, str] = {}
    for segment in found.folder.segments.values():
        if segment.sealed and not found.folder.verify_header(segment):
            report.damage.append(f"{segment.path.name}: header or size is not as it was sealed")
            bad.update((_shown(group), "") for group in segment.users())
    for session in found.state.sessions.values():
        for run in session.runs():
            try:
                rows.check_run(run)
            except (DamagedData, OSError) as error:
                report.damage.append(f"{_shown(session.sid)}: {error}")
                bad[_shown(session.sid)] = ""
                break
    for sid, layers in found.state.states.items():
        for layer, blob in layers.items():
            if not rows.state_is_intact(blob):
                report.damage.append(f"{_shown(sid)} layer {layer}: checksum of a state is wrong")
                bad[_shown(sid)] = ""
    report.starts += [f"{name} is dropped with its prefix when it is first read" for name in bad]


def _take_prefixes(found: list[PrefixLine], worker: int, report: Report) -> None:
    """The prefixes, and what becomes of those whose completion record is damaged."""
    if len(report.workers) > 1:
        found = [replace(prefix, worker=worker) for prefix in found]
    report.prefixes += found
    for prefix in found:
        if prefix.damaged:
            report.damage.append(f"{prefix.namespace}: {prefix.fault}")
            dropped = f"{prefix.namespace} is dropped with its prefix when it is first read"
            if dropped in report.starts:
                report.starts.remove(dropped)
            report.starts.append(f"{dropped}, prefilled again and stored anew")


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def text(folder: Path, report: Report, *, everything: bool) -> list[str]:
    """The report for people."""
    lines = [f"{folder}:", *(f"  {fact}" for fact in report.facts)]
    whole = sum(prefix.complete for prefix in report.prefixes)
    if report.prefixes:
        lines.append(f"{len(report.prefixes)} prefixes, {whole} of them with a completion record:")
    shown = report.prefixes if everything else report.prefixes[:SHOWN]
    lines += [f"  {prefix.text()}" for prefix in shown]
    if len(shown) < len(report.prefixes):
        lines.append(f"  ... and {len(report.prefixes) - len(shown)} more: --all names them")
    for title, entries in (
        ("no damage", report.notes),
        ("not known", report.unknown),
        ("damaged", report.damage),
        (
            "a start is refused; one with --repair, or of the embedded server, would do this",
            report.repairs,
        ),
        ("beside that" if report.repairs else "any start would do this", report.starts),
    ):
        if entries:
            lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
    return lines
