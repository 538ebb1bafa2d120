"""A hand-over that ends at any of its steps."""

import itertools
from pathlib import Path

import pytest

from metaq.broker.hand_over import hand_over, plan_hand_over, take_back
from metaq.fs import LOCK_FILE, SystemFileSystem
from metaq.storage.holdings import HOLDINGS_FILE
from metaq.zk.definitions import COPY_NAME
from metaq.zk.errors import PayloadError


class Interrupted(Exception):
    """The process ended."""


class Steps(SystemFileSystem):
    """Ends the process before its n-th change."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def step(self) -> None:
        if not self.count:
            raise Interrupted
        self.count -= 1

    def make_directory(self, path: Path, *, is_synced: bool = True) -> None:
        self.step()
        super().make_directory(path, is_synced=is_synced)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.step()
        super().unlink(path)


def test_a_damaged_copy_of_the_definitions_is_named(tmp_path: Path) -> None:
    (tmp_path / "test-0").mkdir()
    (tmp_path / COPY_NAME).write_bytes(b"{")
    with pytest.raises(PayloadError, match=rf"{tmp_path / COPY_NAME}.*remove it"):
        plan_hand_over(SystemFileSystem(), tmp_path)


def test_a_hand_over_that_is_interrupted_anywhere_is_repeated(tmp_path: Path) -> None:
    """The record is never lost, neither there nor back."""
    fs = SystemFileSystem()
    for count in itertools.count():
        data = tmp_path / str(count) / "data"
        (data / "test-0").mkdir(parents=True)
        for name in (LOCK_FILE, "admin.sock", "topics.json.tmp"):
            (data / name).touch()
        (data / HOLDINGS_FILE).write_bytes(b"record")
        steps = Steps(count)
        try:
            hand_over(steps, plan_hand_over(steps, data))
            ended = False
        except Interrupted:
            ended = True
        hand_over(fs, plan_hand_over(fs, data))
        assert fs.list_directory(data) == (LOCK_FILE, "test-0")
        steps = Steps(count)
        try:
            take_back(steps, data)
        except Interrupted:
            take_back(fs, data)
        assert (data / HOLDINGS_FILE).read_bytes() == b"record"
        assert not data.with_name("data.handed-over").exists()
        if not ended:
            break
    assert count > 3
