"""Offsets in a file: the JSON of MetaQ's `LocalOffsetStorage`, safe between processes.

    {"group-1": [{"topic": "test",
                  "partition": {"brokerId": 0, "partition": 1},
                  "offset": 4096, "messageId": 17, "modified": false}]}

MetaQ's clients rewrite the file from memory, so that the last of several processes wins
for every group. Here a commit locks the file `<path>.lock`, reads the file, changes its
own entries, and replaces the file atomically: no entry of another process is lost, and
a crash leaves either the old file or the new one. Unknown properties of entries are
kept. Java clients ignore the lock: one that uses the same file still overwrites it.

Source: docs/metaq-1.4/client.md 13.
"""

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard, TypeVar

from metaq.client.errors import OffsetStoreError
from metaq.client.group.assignments import Fence
from metaq.client.off_loop import OffLoop
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.client.offsets.offset_store import Failures, Offsets
from metaq.clock import Clock, SystemClock
from metaq.errors import LogDirLockedError, RequestTimeoutError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.model import (
    MAX_OFFSET,
    GroupOffset,
    MessageId,
    Offset,
    SizeBytes,
    TopicPartition,
)
from metaq.retry import Backoff

FILE_BYTES_MAX: Final = SizeBytes(16 * 1024 * 1024)
"""Maximum size of the file: some hundred thousand partitions."""
BACKOFF: Final = Backoff(first_s=0.005, max_s=0.1)
"""Delay between attempts to lock the file while another process has the lock."""

T = TypeVar("T")
_Entry = dict[str, Any]
_Groups = dict[str, list[_Entry]]


class FileOffsets:
    """An `OffsetStore` in one file, for any number of groups and processes.

    Durability: on return of a commit the file and its directory are synced.
    Concurrency: one event loop at a time; several objects and processes may share the
    file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        files: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Name the file; it is not accessed before the first call.

        Args:
            path: the file; created by the first commit. Its directory must exist.
            files: the disk, for tests.
            clock: the clock of deadlines, for tests.
        """
        self._path = Path(path)
        self._lock_path = self._path.with_name(self._path.name + ".lock")
        self._files = files or SystemFileSystem()
        self._clock = clock or SystemClock()
        self._off_loop = OffLoop(f"offsets in {self._path}", clock=self._clock)

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None if there is no offset or no file.

        Args:
            group: consumer group.
            partition: partition of the offset.
            deadline_s: absolute.

        Raises:
            OffsetStoreError: the file cannot be parsed.
            StorageError: it cannot be read.
            RequestTimeoutError: the disk does not answer.
        """
        work = partial(self._load, group, partition)
        return await self._off_loop.run(work, deadline_s=deadline_s)

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store all of them or none; durable when this returns.

        Args:
            group: consumer group.
            offsets: the next offset of each partition.
            fence: ignored, because there are no owners.
            deadline_s: absolute.

        Returns:
            An empty mapping: all were stored.

        Raises:
            LogDirLockedError: another process kept the lock until the deadline.
            OffsetStoreError, StorageError, RequestTimeoutError: as for `load`.

        Cancellation: a write in progress may still complete.
        """
        del fence
        if offsets:
            work = partial(self._commit, group, dict(offsets))
            await self._run_unlocked(work, deadline_s)
        return {}

    async def close(self) -> None:
        """Stop the thread; the next call starts another one."""
        self._off_loop.close()

    async def _run_unlocked(self, work: Callable[[], T], deadline_s: float) -> T:
        """Run `work`; retry until the deadline while another process has the lock."""
        failures = 0
        refusal: LogDirLockedError | None = None
        while True:
            try:
                return await self._off_loop.run(work, deadline_s=deadline_s)
            except LogDirLockedError as error:
                failures, refusal = failures + 1, error
            except RequestTimeoutError:
                if refusal is None:
                    raise
                raise refusal from None
            await asyncio.sleep(BACKOFF.delay_s(failures))

    # -- on the thread ----------------------------------------------------------------

    def _load(self, group: str, partition: TopicPartition) -> GroupOffset | None:
        for entry in self._read().get(group, ()):
            if _partition_of(entry) == partition:
                return self._offset_of(entry)
        return None

    def _commit(self, group: str, offsets: dict[TopicPartition, GroupOffset]) -> None:
        lock = self._files.lock_file(self._lock_path)
        try:
            groups = self._read()
            entries = groups.setdefault(group, [])
            for entry in entries:
                changed = offsets.pop(_partition_of(entry), None)
                if changed is not None:
                    entry |= _fields(changed)
            entries += [_entry(*item) for item in sorted(offsets.items(), key=str)]
            data = json.dumps(groups).encode()
            if len(data) > FILE_BYTES_MAX:
                raise OffsetStoreError(
                    f"offsets in {self._path}: expected at most {FILE_BYTES_MAX}"
                    f" bytes, got {len(data)}"
                )
            self._files.write_atomically(self._path, data)
        finally:
            lock.release()

    def _read(self) -> _Groups:
        if not self._files.exists(self._path):
            return {}
        data = self._files.read_file(self._path, FILE_BYTES_MAX)
        if not data.strip():
            return {}
        try:
            groups = json.loads(data)
        # Deep nesting raises RecursionError, bytes that are no text ValueError.
        except (ValueError, RecursionError) as error:
            raise OffsetStoreError(
                f"offsets in {self._path}: expected JSON, got {data[:80]!r}"
            ) from error
        is_known = isinstance(groups, dict) and all(
            isinstance(entries, list) and all(map(_is_entry, entries))
            for entries in groups.values()
        )
        if not is_known:
            raise OffsetStoreError(
                f"offsets in {self._path}: expected groups of entries with topic and"
                f" partition, got {data[:80]!r}"
            )
        return groups  # type: ignore[no-any-return]  # json.loads is untyped

    def _offset_of(self, entry: _Entry) -> GroupOffset:
        offset, message_id = entry.get("offset"), entry.get("messageId")
        if not _is_number(offset) or not 0 <= offset <= MAX_OFFSET:
            raise OffsetStoreError(
                f"offsets in {self._path}: expected an offset from 0 to {MAX_OFFSET},"
                f" got {offset!r}"
            )
        if not _is_number(message_id):
            message_id = NO_MESSAGE
        return GroupOffset(Offset(offset), MessageId(message_id))


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("topic"), str):
        return False
    numbers = entry.get("partition")
    return isinstance(numbers, dict) and all(
        _is_number(numbers.get(name)) for name in ("brokerId", "partition")
    )


def _partition_of(entry: _Entry) -> TopicPartition:
    numbers = entry["partition"]
    return TopicPartition(entry["topic"], numbers["brokerId"], numbers["partition"])


def _fields(offset: GroupOffset) -> _Entry:
    message_id = NO_MESSAGE if offset.message_id is None else offset.message_id
    return {"offset": offset.offset, "messageId": message_id, "modified": False}


def _entry(partition: TopicPartition, offset: GroupOffset) -> _Entry:
    numbers = {"brokerId": partition.broker_id, "partition": partition.partition}
    return {"topic": partition.topic, "partition": numbers, **_fields(offset)}
