"""Answers of one replica to another: each `follow` gets one, now or later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, TypeVar

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
    JOIN,
    SUM,
    TABLES,
    TAIL,
    Question,
    TablesReply,
    TablesRequest,
    decode_pull,
)
from metaq.replication.serving import answer_tail
from metaq.replication.store import ReplicaStore

_log = logging.getLogger(__name__)

Q = TypeVar("Q")
A = TypeVar("A")

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

    def __init__(self, owner: AnswersOwner, store: ReplicaStore) -> None:
        """Answer for a node about its logs."""
        self._owner = owner
        self.store: Final = store
        """The logs, and their epochs."""
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
        payload, copies = command.payload, (self.store.logs.logs(), self.store.tables)
        match command.kind:
            case JOIN.kind:
                self._streams().join(JOIN.decode(payload), session, answer)
            case "pull":
                self._streams().pull(decode_pull(payload), session, answer)
            case TABLES.kind:
                self._spawn(TABLES, payload, self._owner.answer_tables, answer)
            case TAIL.kind:
                self._spawn(TAIL, payload, partial(answer_tail, *copies), answer)
            case SUM.kind:
                self._spawn(SUM, payload, partial(answer_sum, *copies), answer)
            case _:
                raise ServerError(f"follow: no message is called {command.kind!r:.40}")

    def _streams(self) -> LeadingStreams:
        streams = self._owner.streams
        if streams is None:
            raise self._owner.refusal()
        return streams

    def _spawn(
        self,
        question: Question[Q, A],
        payload: bytes,
        work: Callable[[Q], Awaitable[A]],
        answer: Answer,
    ) -> None:
        """Have a question answered by a task."""
        asked = question.decode(payload)
        if len(self._tasks) >= ANSWERS_MAX:
            raise UnavailableError(f"follow: {ANSWERS_MAX} others are answered now")

        async def run() -> None:
            try:
                answer(question.encode_answer(await work(asked)))
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

    async def end(self) -> None:
        """Call off what is not answered."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
