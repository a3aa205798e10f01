"""What recovery found beside the content: a kind with its facts, and a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.server.store.framing import Scan


class Kind(Enum):
    """What was found, and what recovery did about it."""

    #: a file is damaged: it, or a copy of it, was set aside, and ``kept`` of it is served
    SET_ASIDE = auto()
    #: further records of a file that is set aside did not verify either
    SKIPPED = auto()
    #: rows or states of a session are not on disk: it was dropped
    MISSING = auto()
    #: a log ends within a record, of which nobody was told that it is stored: it was cut off
    TORN = auto()
    #: the last record of a log has its length and a wrong checksum: it was cut off
    LAST_CHANGED = auto()
    #: segment files that nothing names were deleted
    ORPHANS = auto()
    #: segment files that nothing names are still there: the disk does not let go of them
    UNDELETED = auto()
    #: segment files that nothing names were set aside: what was lost may have named them
    SEGMENTS_ASIDE = auto()


LAST_CHANGED = (
    "the last record has its length and a wrong checksum: it was changed, or the power failed "
    "before it was on stable storage"
)


class Kept(Enum):
    """How much of a file that was set aside is served."""

    NOTHING = "nothing of it is kept"
    BEGINNING = "what it holds before the damage is kept"
    WHOLE = "what it holds whole is kept, what only adds to something that is lost is not"
    RECORDS = "of its sessions or states those are kept of which every record verifies"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    ``name``: the file's, of MISSING the session's. ``count``: bytes cut off, skipped records or
    files. ``reason`` and ``kept`` are those of SET_ASIDE; ``kept_as`` names what was set aside.
    """

    kind: Kind
    name: str = ""
    count: int = 0
    reason: str = ""
    kept_as: str = ""
    kept: Kept = Kept.NOTHING

    def __str__(self) -> str:
        match self.kind:
            case Kind.SET_ASIDE:
                return f"{self.reason}; the file is kept as {self.kept_as}, {self.kept.value}"
            case Kind.SKIPPED:
                return f"{self.name}: {self.count} more records were skipped"
            case Kind.MISSING:
                return f"{self.name}: rows or states are missing on disk"
            case Kind.TORN:
                return f"{self.name}: torn end of {self.count} bytes cut off"
            case Kind.LAST_CHANGED:
                return f"{self.name}: {LAST_CHANGED}; its {self.count} bytes are cut off"
            case Kind.ORPHANS:
                return f"{self.count} segment files that nothing names were deleted"
            case Kind.UNDELETED:
                return (
                    f"{self.count} segment files that nothing names cannot be deleted: they count "
                    "against the disk budget, and it is tried again"
                )
            case Kind.SEGMENTS_ASIDE:
                return (
                    f"{self.count} segment files that nothing names are kept in {self.kept_as}: "
                    "who deletes it has their room"
                )


def cut_off(name: str, scan: Scan) -> list[Finding]:
    """What is said of the end of a log that is no record: nothing where there is none."""
    if not scan.torn_bytes:
        return []
    kind = Kind.LAST_CHANGED if scan.last_changed else Kind.TORN
    return [Finding(kind, name, scan.torn_bytes)]


def told(findings: Sequence[Finding]) -> dict[str, int]:
    """Findings as numbers, for INFO: files, records and bytes that a start found damaged."""

    def total(*kinds: Kind) -> int:
        return sum(one.count for one in findings if one.kind in kinds)

    return {
        "start_damaged_files": sum(one.kind is Kind.SET_ASIDE for one in findings),
        "start_skipped_records": total(Kind.SKIPPED),
        "start_cut_bytes": total(Kind.TORN, Kind.LAST_CHANGED),
    }
