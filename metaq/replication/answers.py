"""Replies to other replicas: each `follow` gets one, at once or later."""

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
"""Maximum number of questions of other replicas that are handled concurrently."""


class AnswersOwner(Protocol):
    """Interface of the node that `Answers` needs."""

    @property
    def streams(self) -> LeadingStreams | None:
        """Return the streams of the term; None if this replica does not lead."""

    def refusal(self) -> UnavailableError:
        """Return the error for requests that only a leader accepts."""

    async def answer_tables(self, asked: TablesRequest) -> TablesReply:
        """Follow no older epoch from now on, and return the facts of the own copies.

        Raises:
            UnavailableError: this replica may lack bytes itself, or has another epoch.
        """


class Answers:
    """Dispatches messages of other replicas. Owned by the node; used on the loop."""

    def __init__(self, owner: AnswersOwner, store: ReplicaStore) -> None:
        """Create the dispatcher of a node for its logs."""
        self._owner = owner
        self.store: Final = store
        """The logs and their epochs."""
        self._tasks = set[asyncio.Task[None]]()

    def handle(self, command: Follow, session: object, answer: Answer) -> None:
        """Reply to a message, at once or later, exactly once."""
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
        """Start a task that replies to a question."""
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
        """Cancel the unfinished replies."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
