"""Spooled messages survive any fault, in order; removed ones do not return."""

import contextlib
import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.spool import (
    FILE_NAME,
    Spool,
    decode_message,
    encode_message,
    spool_name,
)
from metaq.errors import (
    CorruptRecordError,
    LogDirLockedError,
    LogDirOfflineError,
    NoSpaceError,
    StorageError,
)
from metaq.fs import FileSystem, SystemFileSystem
from metaq.fs.frame_file import FRAME as ENTRY
from metaq.fs.frame_file import HEADER, MARKER, find_markers
from metaq.model import BrokerId, Message, MessageId, Offset, SizeBytes, TopicPartition
from tests.rigs.fs import FaultyFileSystem, crash_points, keep_random

DIRECTORY = Path("/spools/test@g")
NEW_NAME = "spool.new"
SAMPLES = 6


def message(number: int, size: int = 10) -> Message:
    data = b"%d:" % number + b"x" * size
    partition = TopicPartition("test", BrokerId(1), 2)
    offset = Offset(number * 100)
    return Message(
        "test", data, None, MessageId(number), partition, offset, Offset(offset + 100)
    )


def content(spool: Spool) -> list[int]:
    """Return the numbers of the messages in it, in order."""
    found = []
    for number in spool.numbers():
        stored = spool.read(number)
        assert stored is not None
        assert stored == message(int(stored.data.split(b":")[0]), _size(stored))
        found.append(int(stored.id))
    assert len(found) == len(spool)
    return found


def _size(stored: Message) -> int:
    return len(stored.data.split(b":")[1])


def opened(fs: FileSystem) -> Spool:
    return Spool(fs, DIRECTORY)


texts = st.text(st.sampled_from("aé\ud800\n@/"), max_size=9)
numbers = st.integers(-(2**63), 2**63 - 1)


keys = st.none() | st.binary(max_size=4)
headers = st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=3)), max_size=2)


@given(texts, st.binary(), st.none() | texts, numbers, numbers, keys, headers)
def test_a_message_comes_out_as_it_went_in(
    topic: str,
    data: bytes,
    attribute: str | None,
    message_id: int,
    offset: int,
    key: bytes | None,
    pairs: list[tuple[str, bytes]],
) -> None:
    partition = TopicPartition(topic, BrokerId(1023), 7)
    place = (MessageId(message_id), partition, Offset(offset), Offset(offset))
    stored = Message(topic, data, attribute, *place, key, tuple(pairs))
    assert decode_message(encode_message(stored)) == stored


def test_messages_stay_in_order_over_a_restart() -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    marks = [spool.append(message(number)) for number in range(5)]
    assert marks == sorted(marks)
    spool.remove([marks[0], marks[3], 999])
    assert content(spool) == [1, 2, 4]
    spool.close()
    again = opened(fs)
    assert content(again) == [1, 2, 4]
    assert again.append(message(5)) > marks[-1]
    assert content(again) == [1, 2, 4, 5]
    assert again.read(marks[0]) is None
    again.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    fs = SystemFileSystem()
    spool = Spool(fs, tmp_path / "a" / "b")
    with pytest.raises(LogDirLockedError):
        Spool(fs, tmp_path / "a" / "b")
    spool.close()
    Spool(fs, tmp_path / "a" / "b").close()


@pytest.mark.parametrize(
    ("topic", "owner", "name"),
    [
        ("test", "0-1", "test@0-1"),
        ("a@b", "c@d", "a%40b@c%40d"),
        ("a/b", "..", "a%2Fb@.."),
        ("ü", "%", "%C3%BC@%25"),
    ],
)
def test_names_are_safe_and_tell_apart(topic: str, owner: str, name: str) -> None:
    assert spool_name(topic, owner) == name


def test_the_bound_is_kept_and_room_that_was_freed_is_used() -> None:
    fs = FaultyFileSystem()
    spool = Spool(fs, DIRECTORY, size_bytes_max=SizeBytes(1000))
    count = 1000 // (ENTRY.size + len(encode_message(message(0))))
    marks = [spool.append(message(number)) for number in range(count)]
    with pytest.raises(NoSpaceError, match="1000 bytes"):
        spool.append(message(count))
    spool.remove(marks[:2])
    spool.append(message(count))
    assert content(spool) == list(range(2, count + 1))
    assert fs.size_of(DIRECTORY / FILE_NAME) <= 1000
    spool.close()


def test_the_file_shrinks_when_messages_are_removed() -> None:
    fs = FaultyFileSystem()
    spool = Spool(fs, DIRECTORY, compact_bytes=500)
    for number in range(200):
        spool.append(message(number))
        if number >= 3:
            spool.remove(spool.numbers(1))
    assert content(spool) == [197, 198, 199]
    assert fs.size_of(DIRECTORY / FILE_NAME) < 1500
    spool.close()
    again = opened(fs)
    assert content(again) == [197, 198, 199]
    again.close()


def test_a_full_disk_takes_nothing_and_harms_nothing() -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    spool.append(message(0))
    fs.set_capacity(sum(fs.size_of(DIRECTORY / n) for n in (FILE_NAME, ".lock")) + 5)
    with pytest.raises(NoSpaceError):
        spool.append(message(1))
    fs.set_capacity(1 << 20)
    spool.append(message(2))
    assert content(spool) == [0, 2]
    spool.close()
    again = opened(fs)
    assert content(again) == [0, 2]
    again.close()


def test_the_last_messages_are_removed_on_a_full_disk_too() -> None:
    """A disk that the spool itself has filled has free space when it is empty."""
    fs = FaultyFileSystem()
    spool = opened(fs)
    numbers = [spool.append(message(number)) for number in range(3)]
    fs.set_capacity(1)
    with pytest.raises(NoSpaceError):
        spool.remove(numbers[:2])
    assert content(spool) == [2]
    spool.remove(numbers)
    assert content(spool) == []
    fs.set_capacity(1 << 20)
    spool.append(message(7))
    spool.close()
    again = opened(fs)
    assert content(again) == [7]
    again.close()


@pytest.mark.parametrize("numbers", [[], [3]])
def test_a_removal_that_found_no_space_is_written_by_the_next(
    numbers: list[int],
) -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    for number in range(4):
        spool.append(message(number))
    fs.set_capacity(1)
    for number in spool.numbers(2):
        with pytest.raises(NoSpaceError):
            spool.remove([number])
    assert content(spool) == [2, 3]
    restarted = opened(fs.crash())
    assert content(restarted) == [0, 1, 2, 3]
    restarted.close()
    fs.set_capacity(1 << 20)
    spool.remove(numbers)
    restarted = opened(fs.crash())
    assert content(restarted) == [n for n in (2, 3) if n + 1 not in numbers]
    restarted.close()
    spool.close()


def test_a_new_file_leaves_out_what_could_not_be_removed() -> None:
    fs = FaultyFileSystem()
    spool = Spool(fs, DIRECTORY, size_bytes_max=SizeBytes(1000))
    count = 1000 // (ENTRY.size + len(encode_message(message(0))))
    for number in range(count):
        spool.append(message(number))
    fs.set_capacity(1)
    with pytest.raises(NoSpaceError):
        spool.remove(spool.numbers(2))
    fs.set_capacity(1 << 20)
    spool.append(message(count))  # needs a new file
    restarted = opened(fs.crash())
    assert content(restarted) == list(range(2, count + 1))
    restarted.close()
    spool.close()


def test_after_a_failed_sync_nothing_is_believed_until_the_next_start() -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    spool.append(message(0))
    fs.fail_at(fs.calls + 2, errno.EIO)  # the write, then the sync
    with pytest.raises(StorageError):
        spool.append(message(1))
    with pytest.raises(LogDirOfflineError):
        spool.append(message(2))
    assert content(spool) == [0]
    spool.close()
    again = opened(fs.crash())
    assert content(again) == [0]
    again.close()


def test_damage_before_whole_entries_is_told_and_not_cut() -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    for number in range(3):
        spool.append(message(number))
    spool.close()
    size = fs.size_of(DIRECTORY / FILE_NAME)
    fs.flip_bit(DIRECTORY / FILE_NAME, 8 * (HEADER.size + ENTRY.size + 50))
    with pytest.raises(CorruptRecordError, match=f"position {HEADER.size}"):
        opened(fs)
    assert fs.size_of(DIRECTORY / FILE_NAME) == size
    assert fs.open_paths() == []


def test_damage_of_the_header_is_told() -> None:
    fs = FaultyFileSystem()
    opened(fs).close()
    fs.flip_bit(DIRECTORY / FILE_NAME, 3)
    with pytest.raises(CorruptRecordError, match="header"):
        opened(fs)


@pytest.mark.parametrize("size", [1, ENTRY.size - 1, ENTRY.size, ENTRY.size + 30])
def test_a_torn_tail_is_cut(size: int) -> None:
    fs = FaultyFileSystem()
    spool = opened(fs)
    spool.append(message(0))
    whole = fs.size_of(DIRECTORY / FILE_NAME)
    spool.append(message(1))
    spool.close()
    file = fs.open_append(DIRECTORY / FILE_NAME, create=False)
    file.truncate(SizeBytes(whole + size))
    file.sync()
    file.close()
    again = opened(fs)
    assert content(again) == [0]
    again.append(message(2))
    assert content(again) == [0, 2]
    again.close()


def test_markers_are_found_where_pieces_meet() -> None:
    fs = FaultyFileSystem()
    fs.make_directory(Path("/m"))
    for before in range(40):
        fs.write_atomically(Path("/m/f"), b"y" * before + MARKER + b"z" * 9)
        file = fs.open_read(Path("/m/f"))
        assert list(find_markers(file, 0, before + 13, 16)) == [before]
        file.close()


# -- every call fails once, the power goes at every sync ------------------------------


class Life:
    """A life of a spool, and what it was promised."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.in_doubt: set[int] = set()

    def run(self, fs: FileSystem) -> None:
        spool = Spool(fs, DIRECTORY, compact_bytes=300)
        try:
            self.work(spool)
        finally:
            spool.close()

    def work(self, spool: Spool) -> None:
        marks: list[tuple[int, int]] = []
        for number in range(12):
            self.in_doubt.add(number)
            marks.append((spool.append(message(number, 60)), number))
            self.in_doubt.discard(number)
            self.kept.append(number)
            if number % 3 == 2:
                gone, marks = marks[:2], marks[2:]
                for _, old in gone:
                    self.kept.remove(old)
                    self.in_doubt.add(old)
                spool.remove([mark for mark, _ in gone])
                self.in_doubt -= {old for _, old in gone}

    def check(self, fs: FileSystem) -> None:
        spool = opened(fs)
        found = content(spool)
        assert found == sorted(found)
        assert set(self.kept) <= set(found) <= set(self.kept) | self.in_doubt
        spool.append(message(99))
        assert content(spool) == [*found, 99]
        spool.close()
        assert not fs.exists(DIRECTORY / NEW_NAME)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_nothing_promised_is_lost(number: int, seed: int) -> None:
    whole = FaultyFileSystem()
    Life().run(whole)
    for call in range(1, whole.calls + 1):
        fs, life = FaultyFileSystem(), Life()
        fs.fail_at(call, number)
        with contextlib.suppress(StorageError):
            life.run(fs)
        assert fs.open_paths() == []
        life.check(fs.crash(keep_random(seed + call)))


@pytest.mark.slow
def test_whenever_the_power_goes_nothing_promised_is_lost(seed: int) -> None:
    fs, life = FaultyFileSystem(), Life()
    points = crash_points(
        fs, lambda: life.run(fs), lambda: (list(life.kept), set(life.in_doubt))
    )
    assert len(points) > 20
    for number, point in enumerate(points):
        after = Life()
        after.kept, after.in_doubt = point.progress
        for sample in range(SAMPLES):
            choose = keep_random(seed + number * 100 + sample)
            after.check(point.disk.crash(choose, torn=True))
