"""A start that is refused anything loses nothing: the next one finds all that was stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import CommandError
from tests.recovery.broken import SSM_WAL, VSTORE_WAL, content_of
from tests.recovery.driving import Content, Driver, Options
from tests.recovery.faults import failing
from tests.recovery.material import rows, store_all

SEGMENTS = "pion.segments.0"


def _much_to_do(folder: Path) -> Content:
    """A folder whose start cuts logs, drops a prefix that is damaged, and deletes files."""
    with Driver(folder) as driver:
        store_all(driver, "a")
        driver.ask("KV.PREFIX.SAVE")
        store_all(driver, "b")
        driver.ask(*rows("a_pk", 1, 3, 600))
        store_all(driver, "gone")
        (gone,) = (s for s in driver.store.segments.segments.values() if s.group == b"gone")
        content = driver.content()
    kept_by_the_disk = (folder / SEGMENTS).glob("*.safetensors")
    shutil.copyfile(next(kept_by_the_disk), folder / SEGMENTS / "orphan.safetensors")
    gone.path.unlink()
    for name in (VSTORE_WAL, SSM_WAL):
        with (folder / name).open("ab") as file:
            file.write(b"\0\1\2torn")
    (folder / SEGMENTS / "another.safetensors.tmp").write_bytes(b"x")
    (folder / "pion.vstore.0.tmp").write_bytes(b"x")
    return {key: value for key, value in content.items() if not key[1].startswith(b"gone")}


@pytest.mark.parametrize("forever", [False, True], ids=["one fault", "a failing disk"])
@pytest.mark.parametrize("salvage", [False, True], ids=["", "repair"])
def test_a_start_that_fails_at_any_call_is_made_good_by_the_next(
    folder: Path, salvage: bool, forever: bool
) -> None:
    source = folder / "source"
    source.mkdir()
    expected = _much_to_do(source)
    options = Options(salvage=salvage)
    for fail_at in range(100):
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
        started = False
        with failing(fail_at, forever) as faults:
            try:
                with Driver(place, options):
                    started = True
            except (OSError, CommandError):
                assert faults.failed
        where = (fail_at, faults.failed)
        assert started or not set(faults.failed) <= {"unlink"}, where
        assert content_of(place, options) == expected, where
        with Driver(place) as driver:
            assert driver.content() == expected, where
            assert driver.store.replayed.notes == [], where
        if not faults.failed:
            assert fail_at >= 20
            return
    raise AssertionError("never got through")
