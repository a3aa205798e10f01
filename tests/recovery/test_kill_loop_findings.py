"""What the kill loop found once, each made to happen."""

from __future__ import annotations

from pathlib import Path

from pion_vllm_mlx.server.store.files import FileHandle, pread_exactly
from pion_vllm_mlx.server.store.segments import SegmentFolder


def test_a_segment_that_is_unlinked_while_a_thread_opens_it_stays_readable(folder: Path) -> None:
    """Rows that had moved while they were verified were taken for damaged, and dropped."""
    segments = SegmentFolder(folder / "segments")
    segment = segments.create(b"a", 1024)
    region = segments.reserve(b"a", 5, 1)
    region.write(b"whole", 0)
    segments.files.forget(segment.path)  # as after a start
    open_it = segments.files.get

    def opened_too_late(path: Path) -> FileHandle:
        segments.files.get = open_it  # type: ignore[method-assign]
        segments.unlink(segment)
        return open_it(path)

    segments.files.get = opened_too_late  # type: ignore[method-assign]
    file = segment.file
    assert not segment.path.exists()
    assert pread_exactly(file.fd, 5, region.offset) == b"whole"
