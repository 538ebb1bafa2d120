"""Local retry store: failed messages on the local disk, to be handled again later.

There is one spool per topic and group. In every round the workers that handle all other
messages also handle each message of a spool once, one at a time, in the order of their
addition. Handled messages are removed; the others stay for the next round.

Source: docs/metaq-1.4/client.md 12.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.consume.redelivery import FailureLog, RetryPolicy
from metaq.client.off_loop import call_off_loop, close_off_loop, open_off_loop
from metaq.client.spool import SPOOL_THREADS_MAX, Spool, spool_name
from metaq.client.timeouts import finish
from metaq.errors import MetaqError, NoSpaceError
from metaq.fs import FileSystem, SystemFileSystem
from metaq.fs.helper_threads import HelperThreads
from metaq.model import Message

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0


class LocalRetryStore:
    """Keeps failed messages of one consumer to handle them again.

    Concurrency: on the loop, except `waiting_count`.
    """

    def __init__(
        self,
        fetch_buffer: FetchBuffer,
        *,
        group: str,
        topics: Collection[str],
        policy: RetryPolicy,
        fs: FileSystem | None = None,
    ) -> None:
        """Prepare one spool per topic, later for those that come; `start` opens."""
        assert policy.park_dir is not None
        self._fetch_buffer = fetch_buffer
        self._group = group
        self._policy = policy
        self._fs = fs or SystemFileSystem()
        self._root = Path(policy.park_dir)
        self._topics = topics
        self._opening = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._threads = HelperThreads(
            min(len(topics) or 1, SPOOL_THREADS_MAX), f"retry store of {group}"
        )
        self._failure_log = FailureLog(_log)
        self._spools: dict[str, Spool] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.replayed_count = 0
        self.failure_count = 0
        self.last_error: MetaqError | None = None
        """Error that ended the last round early; None: it did not end early."""

    @property
    def waiting_count(self) -> int:
        """Number of messages in the store; from any thread."""
        return sum(map(len, tuple(self._spools.values())))

    # -- life -------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the spools, and begin to replay.

        Raises:
            StorageError: a spool cannot be opened; all are closed.

        Cancellation: all are closed.
        """
        try:
            for topic in self._topics:
                await self._open(topic)
        except BaseException:
            await self.close()
            raise
        self._task = self._loop.create_task(self._run(), name="local retry store")

    async def _open(self, topic: str) -> Spool:
        """Return the spool of a topic, which may match a pattern since a moment ago."""
        async with self._opening:
            if topic not in self._spools:
                directory = self._root / spool_name(topic, self._group)
                opening = partial(Spool, self._fs, directory)
                self._spools[topic] = await open_off_loop(self._threads, opening)
            return self._spools[topic]

    async def close(self) -> None:
        """Stop the replay and close the spools; their messages stay. Never raises.

        If a disk hangs it returns after `CLOSE_TIMEOUT_S`; the files are closed when
        the disk answers.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fetch_buffer.drop_replayed()
        if self._closing is None:
            self._closing = self._loop.create_task(self._close_spools())
        _done, late = await asyncio.wait([self._closing], timeout=CLOSE_TIMEOUT_S)
        if late:
            _log.warning(
                "retry store is not closed yet, the disk does not answer: group=%s"
                " timeout_s=%.1f",
                self._group,
                CLOSE_TIMEOUT_S,
            )

    async def _close_spools(self) -> None:
        for spool in self._spools.values():
            await close_off_loop(self._threads, spool)
        self._threads.shutdown(wait=False)

    async def add(self, message: Message) -> None:
        """Store a message; it is on disk on return.

        Raises:
            StorageError: it could not be written.

        Cancellation: it may be stored, and still be delivered again.
        """
        spool = await self._open(message.topic)
        await call_off_loop(self._threads, spool.append, message)

    # -- replay -----------------------------------------------------------------------

    async def _run(self) -> None:
        await asyncio.sleep(self._policy.replay_first_s)
        while True:
            try:
                for spool in tuple(self._spools.values()):
                    await self._replay(spool)
                self.last_error = None
            except MetaqError as error:
                self.last_error = error
                _log.error("replay ended early: group=%s: %s", self._group, error)
            except Exception as error:  # noqa: BLE001  # the next round may succeed
                self.last_error = MetaqError(f"replay failed: {error!r}")
                _log.exception("replay failed: group=%s", self._group)
            await asyncio.sleep(self._policy.replay_interval_s)

    async def _replay(self, spool: Spool) -> None:
        """Have every message of a spool handled once.

        Raises:
            NoSpaceError: the disk is full; after a restart, handled messages may be
                handled again.
            StorageError: the disk refused.
        """
        for number in await call_off_loop(self._threads, spool.numbers):
            message = await call_off_loop(self._threads, spool.read, number)
            if message is None:
                continue
            failure = await self._handle(message)
            if failure is None:
                with suppress(NoSpaceError):  # raised at the end of the round
                    await call_off_loop(self._threads, spool.remove, (number,))
                self.replayed_count += 1
                continue
            self.failure_count += 1
            self._failure_log.write(
                f"message of the retry store failed: group={self._group}"
                f" partition={message.partition} offset={message.offset}"
                f" id={message.id}: {failure!r}",
                failure,
                is_last=False,
            )
        await call_off_loop(self._threads, spool.remove, ())

    async def _handle(self, message: Message) -> BaseException | None:
        """Have a worker handle a message; return its handler's exception, or None."""
        ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        soon = self._loop.call_soon_threadsafe
        batch = FetchedBatch(
            message.partition,
            [message],
            message.next_offset,
            size_bytes=0,
            on_replayed=lambda failure: soon(finish, ended, failure),
        )
        self._fetch_buffer.put_replayed(batch)
        return await ended
