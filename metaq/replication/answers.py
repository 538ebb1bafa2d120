"""Answers of one replica to another: each `follow` gets one, now or later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol

from metaq.errors import (
    MetaqError,
    RemoteProtocolError,
    ServerError,
    UnavailableError,
    WireError,
)
from metaq.protocol.commands import Follow
from metaq.replication.comparing import answer_sum
from metaq.replication.leading import Answer, LeadingStreams
from metaq.replication.messages import (
    SumRequest,
    TablesReply,
    TablesRequest,
    TailRequest,
    decode_join,
    decode_pull,
    decode_sum,
    decode_tables,
    decode_tail,
    encode_sum_reply,
    encode_tables_reply,
    encode_tail_reply,
)
from metaq.replication.serving import answer_tail
from metaq.replication.tables import EpochTables
from metaq.storage.log_manager import LogManager

_log = logging.getLogger(__name__)

ANSWERS_MAX: Final = 16
"""Questions of other replicas that are answered at a time."""


class AnswersOwner(Protocol):
    """Interface of the node."""

    @property
    def streams(self) -> LeadingStreams | None:
        """Return the streams of a leader; None where it is none."""

    def refusal(self) -> UnavailableError:
        """Return why it does not lead."""

    async def answer_tables(self, asked: TablesRequest) -> TablesReply:
        """Follow no older epoch from now on, and return what is here.

        Raises:
            UnavailableError: it may lack bytes itself, or has another epoch.
        """


class Answers:
    """Owner: the node; on the loop's thread."""

    def __init__(
        self, owner: AnswersOwner, logs: LogManager, tables: EpochTables
    ) -> None:
        """Answer for a node about its logs."""
        self._owner = owner
        self._logs = logs
        self.tables: Final = tables
        """Epochs of the logs."""
        self._tasks = set[asyncio.Task[None]]()

    def handle(self, command: Follow, session: object, answer: Answer) -> None:
        """Answer a message, now or later, exactly once."""
        try:
            self._dispatch(command, session, answer)
        except WireError as error:
            answer(error)
        except RemoteProtocolError as error:
            answer(ServerError(f"follow {command.kind}: {error}"))

    def _dispatch(self, command: Follow, session: object, answer: Answer) -> None:
        match command.kind:
            case "join":
                request = decode_join(command.payload)
                self._streams().join(request, session, answer)
            case "pull":
                self._streams().pull(decode_pull(command.payload), session, answer)
            case "tables":
                asked = decode_tables(command.payload)
                self._spawn(partial(self._tables, asked), answer)
            case "tail":
                wanted = decode_tail(command.payload)
                self._spawn(partial(self._tail, wanted), answer)
            case "sum":
                compared = decode_sum(command.payload)
                self._spawn(partial(self._sum, compared), answer)
            case _:
                raise ServerError(f"follow: no message is called {command.kind!r:.40}")

    def _streams(self) -> LeadingStreams:
        streams = self._owner.streams
        if streams is None:
            raise self._owner.refusal()
        return streams

    def _spawn(self, work: Callable[[], Awaitable[bytes]], answer: Answer) -> None:
        """Have a question answered by a task."""
        if len(self._tasks) >= ANSWERS_MAX:
            raise UnavailableError(f"follow: {ANSWERS_MAX} others are answered now")

        async def run() -> None:
            try:
                answer(await work())
            except WireError as error:
                answer(error)
            except MetaqError as error:
                answer(ServerError(str(error)))
            except Exception:  # noqa: BLE001  # the other one must not wait for ever
                _log.exception("a question of another replica failed")
                answer(ServerError("follow: internal error, see the broker's log"))

        task = asyncio.create_task(run(), name="answer")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tables(self, asked: TablesRequest) -> bytes:
        return encode_tables_reply(await self._owner.answer_tables(asked))

    async def _tail(self, asked: TailRequest) -> bytes:
        return encode_tail_reply(
            await answer_tail(self._logs.logs(), self.tables, asked)
        )

    async def _sum(self, asked: SumRequest) -> bytes:
        return encode_sum_reply(await answer_sum(self._logs.logs(), self.tables, asked))

    async def end(self) -> None:
        """Call off what is not answered."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
