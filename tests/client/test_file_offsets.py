"""Offsets in a file, in the format of MetaQ's clients."""

import asyncio
import json
import multiprocessing
from pathlib import Path

import pytest

from metaq.client.errors import OffsetStoreError
from metaq.client.offsets.file_offsets import FILE_BYTES_MAX, FileOffsets
from metaq.client.offsets.offset_store import OffsetStore
from metaq.errors import DiskError, LogDirLockedError, NoSpaceError
from metaq.fs import DirLock, SystemFileSystem
from metaq.testing.clock import ManualClock
from tests.client.stored_offsets import ONE, PLACE, ZERO, at, commit, load, run
from tests.rigs.waiting import until


class Refusals(SystemFileSystem):
    """The disk; counts how often another process had the lock."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def lock_file(self, path: Path) -> DirLock:
        try:
            return super().lock_file(path)
        except LogDirLockedError:
            self.count += 1
            raise


def test_a_file_of_an_old_java_client_is_read_and_its_properties_stay(
    tmp_path: Path,
) -> None:
    """Unknown properties, another order, no message id: all of it was written once."""
    path = tmp_path / "offsets"
    old = {
        "java-group": [
            {
                "offset": 13,
                "modified": True,
                "partition": {
                    "partition": 1, "brokerId": 0, "acked": False,
                    "rollback": False, "autoAck": True,
                },
                "topic": "t",
                "unknown": [1, {}],
            },
            {"topic": "t", "partition": {"brokerId": 0, "partition": 0}, "offset": 5},
        ]
    }  # fmt: skip
    path.write_text(json.dumps(old))
    assert load(FileOffsets(path), "java-group", ONE) == at(13)
    assert load(FileOffsets(path), "java-group", ZERO) == at(5)
    commit(FileOffsets(path), "java-group", {ONE: at(26, 3)})
    first, second = json.loads(path.read_text())["java-group"]
    assert first["unknown"] == [1, {}]
    assert first["partition"]["autoAck"] is True
    assert (first["offset"], first["messageId"], first["modified"]) == (26, 3, False)
    assert second == old["java-group"][1]


def test_the_file_has_the_properties_that_java_reads(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    commit(FileOffsets(path), "g", {ONE: at(8, 7)})
    place = {"brokerId": 0, "partition": 1}
    entry = {"topic": "t", "partition": place, "offset": 8, "messageId": 7}
    assert json.loads(path.read_text()) == {"g": [entry | {"modified": False}]}


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    path.write_text("\n")
    assert load(FileOffsets(path), "g", ZERO) is None
    commit(FileOffsets(path), "g", {ZERO: at(1)})
    assert load(FileOffsets(path), "g", ZERO) == at(1)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "\xff",
        '{"g": 1}',
        '{"g": [1]}',
        '{"g": [{"topic": "t"}]}',
        '{"g": [{"topic": 1, "partition": {"brokerId": 0, "partition": 0}}]}',
        '{"g": [{"topic": "t", "partition": {"brokerId": 0, "partition": 0}}]}',
        f'{{"g": [{{{PLACE}, "offset": -1}}]}}',
        f'{{"g": [{{{PLACE}, "offset": true}}]}}',
        "[" * 100_000,
    ],
)
def test_a_file_that_nobody_can_read_is_an_error_with_its_name(
    tmp_path: Path, text: str
) -> None:
    """Starting from the beginning because of a broken file would be silent."""
    path = tmp_path / "offsets"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OffsetStoreError, match=str(path)):
        load(FileOffsets(path), "g", ZERO)


def test_a_broken_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    path.write_text("no JSON")
    with pytest.raises(OffsetStoreError):
        commit(FileOffsets(path), "g", {ZERO: at(1)})
    assert path.read_text() == "no JSON"


def test_a_missing_directory_is_the_disk_s_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="ENOENT"):
        commit(FileOffsets(tmp_path / "no" / "offsets"), "g", {ZERO: at(1)})


@pytest.mark.slow
def test_a_file_that_grows_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    large = "g" * (FILE_BYTES_MAX - 199)
    commit(FileOffsets(path), large, {ZERO: at(1)})
    text = f"at most {FILE_BYTES_MAX} bytes, got {FILE_BYTES_MAX}"[:-3]
    with pytest.raises(OffsetStoreError, match=text):
        commit(FileOffsets(path), "g", {ONE: at(1)})
    assert load(FileOffsets(path), large, ZERO) == at(1)


class Full(SystemFileSystem):
    """A disk without room."""

    def write_atomically(self, *_args: object) -> None:
        raise NoSpaceError("write found no room")


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    commit(FileOffsets(path), "g", {ZERO: at(1)})
    with pytest.raises(NoSpaceError):
        commit(FileOffsets(path, files=Full()), "g", {ZERO: at(2)})
    assert load(FileOffsets(path), "g", ZERO) == at(1)
    commit(FileOffsets(path), "g", {ZERO: at(3)})  # the lock was given back


def test_a_commit_waits_for_the_lock_and_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    lock = SystemFileSystem().lock_file(tmp_path / "offsets.lock")
    clock = ManualClock()
    files = Refusals()

    async def scenario(store: OffsetStore) -> None:
        late_s = clock.monotonic_s() + 10
        failing = asyncio.ensure_future(
            store.commit("g", {ZERO: at(1)}, fence=None, deadline_s=late_s)
        )
        await until(lambda: files.count >= 2)
        assert not failing.done()
        clock.advance_s(11)
        with pytest.raises(LogDirLockedError, match=r"offsets\.lock pid="):
            await failing
        late_s = clock.monotonic_s() + 10
        assert await store.load("g", ZERO, deadline_s=late_s) is None
        before = files.count
        waiting = asyncio.ensure_future(
            store.commit("g", {ZERO: at(2)}, fence=None, deadline_s=late_s)
        )
        await until(lambda: files.count >= before + 2)
        assert not waiting.done()
        lock.release()
        await waiting
        assert await store.load("g", ZERO, deadline_s=late_s) == at(2)

    run(FileOffsets(path, files=files, clock=clock), scenario)


def _commit_often(path: str, group: str, count: int) -> None:
    for number in range(1, count + 1):
        commit(FileOffsets(path), group, {ZERO: at(number)})


@pytest.mark.slow
def test_processes_do_not_overwrite_each_other_s_groups(tmp_path: Path) -> None:
    path = tmp_path / "offsets"
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_commit_often, args=(str(path), f"g{n}", 30))
        for n in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    for n in range(4):
        assert load(FileOffsets(path), f"g{n}", ZERO) == at(30)
