"""Answers to other replicas: each question gets one, and none is waited for in vain."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.errors import ServerError, UnavailableError, WireError
from metaq.model import MessageId
from metaq.protocol.commands import Follow
from metaq.replication.answers import ANSWERS_MAX, Answers
from metaq.replication.election import Flag
from metaq.replication.epochs import Epoch
from metaq.replication.messages import (
    JOIN,
    PULL,
    SUM,
    TABLES,
    TAIL,
    JoinRequest,
    Pull,
    TablesReply,
    TablesRequest,
    TailReply,
    TailRequest,
    encode_pull,
)
from tests.rigs.waiting import until

ASKED = TablesRequest("s1", Epoch(3, "n"), 2)


class Owner:
    """A replica that answers what a test lets it."""

    def __init__(self) -> None:
        self.streams: Any = None
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[TablesRequest] = []

    def refusal(self) -> UnavailableError:
        return UnavailableError("replica 1 does not lead")

    async def answer_tables(self, asked: TablesRequest) -> TablesReply:
        self.asked.append(asked)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return TablesReply((), MessageId(7))


class Logs:
    """A replica without logs."""

    def logs(self) -> dict[Any, Any]:
        return {}


def run(scenario: Callable[[Owner, Answers], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        owner, logs = Owner(), Logs()
        answers = Answers(owner, SimpleNamespace(logs=logs, tables=None))  # type: ignore[arg-type]
        await scenario(owner, answers)
        await answers.end()

    asyncio.run(main())


def ask(answers: Answers, kind: str, payload: bytes = b"") -> list[bytes | WireError]:
    """Ask something; return the list that gets the answer."""
    found: list[bytes | WireError] = []
    answers.handle(Follow(kind, payload, 5), object(), found.append)
    return found


def test_a_message_of_no_known_kind_is_refused() -> None:
    """A newer replica may ask what this one does not know."""

    async def scenario(_owner: Owner, answers: Answers) -> None:
        (found,) = ask(answers, "repair")
        assert isinstance(found, ServerError)
        assert str(found) == "follow: no message is called 'repair'"

    run(scenario)


@pytest.mark.parametrize("kind", [JOIN.kind, PULL, TABLES.kind, TAIL.kind, SUM.kind])
def test_a_payload_that_cannot_be_read_is_refused(kind: str) -> None:
    """In one sentence; the connection goes on."""

    async def scenario(owner: Owner, answers: Answers) -> None:
        owner.streams = SimpleNamespace(join=None, pull=None)
        (found,) = ask(answers, kind, b"nonsense")
        assert isinstance(found, ServerError)
        assert str(found).startswith(f"follow {kind}: ")

    run(scenario)


def test_one_that_does_not_lead_takes_no_join_or_pull() -> None:
    """It names the leader, if it knows one."""
    epoch = Epoch(3, "n")
    join = JoinRequest("s1", epoch, 2, 5, "token", 1, Flag.NONE, ())
    pull = Pull(epoch, 2, 5, 1, (), 9)

    async def scenario(_owner: Owner, answers: Answers) -> None:
        for kind, payload in (
            (JOIN.kind, JOIN.encode(join)),
            (PULL, encode_pull(pull)),
        ):
            (found,) = ask(answers, kind, payload)
            assert isinstance(found, UnavailableError)
            assert str(found) == "replica 1 does not lead"

    run(scenario)


def test_tables_are_answered_later() -> None:
    """After the promise is on the disk."""

    async def scenario(owner: Owner, answers: Answers) -> None:
        owner.gate.clear()
        found = ask(answers, TABLES.kind, TABLES.encode(ASKED))
        await until(lambda: owner.asked)
        assert found == []
        owner.gate.set()
        await until(lambda: found)
        assert isinstance(found[0], bytes)
        assert TABLES.decode_answer(found[0]) == TablesReply((), MessageId(7))
        assert owner.asked == [ASKED]

    run(scenario)


def test_a_tail_of_a_log_that_is_not_here_is_none() -> None:
    """The claimer looks elsewhere."""

    async def scenario(_owner: Owner, answers: Answers) -> None:
        request = TailRequest("s1", Epoch(3, "n"), 9, 0, 100)  # type: ignore[arg-type]
        found = ask(answers, TAIL.kind, TAIL.encode(request))
        await until(lambda: found)
        assert isinstance(found[0], bytes)
        assert TAIL.decode_answer(found[0]) == TailReply(None)

    run(scenario)


def test_an_error_is_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Also a bug: the other replica does not wait, and the log has all of it."""

    async def scenario(owner: Owner, answers: Answers) -> None:
        for error, text in (
            (UnavailableError("later"), "later"),
            (AssertionError("a bug"), "follow: internal error, see the broker's log"),
        ):
            owner.error = error
            found = ask(answers, TABLES.kind, TABLES.encode(ASKED))
            await until(lambda found=found: found)
            assert str(found[0]) == text
            assert isinstance(found[0], WireError)

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert "a bug" in caplog.text


def test_questions_that_are_answered_at_a_time_are_bounded() -> None:
    """Another one is told to come again."""

    async def scenario(owner: Owner, answers: Answers) -> None:
        owner.gate.clear()
        waiting = [
            ask(answers, TABLES.kind, TABLES.encode(ASKED)) for _ in range(ANSWERS_MAX)
        ]
        (found,) = ask(answers, TABLES.kind, TABLES.encode(ASKED))
        assert isinstance(found, UnavailableError)
        assert f"{ANSWERS_MAX} others are answered now" in str(found)
        owner.gate.set()
        await until(lambda: all(waiting))
        again = ask(answers, TABLES.kind, TABLES.encode(ASKED))
        await until(lambda: again)
        assert isinstance(again[0], bytes)

    run(scenario)


def test_the_end_calls_off_what_is_not_answered() -> None:
    """Begun or not: the connection ends as well."""

    async def scenario(owner: Owner, answers: Answers) -> None:
        owner.gate.clear()
        begun = ask(answers, TABLES.kind, TABLES.encode(ASKED))
        await until(lambda: owner.asked)
        later = ask(answers, TABLES.kind, TABLES.encode(ASKED))
        await answers.end()
        owner.gate.set()
        await asyncio.sleep(0)
        assert begun == later == []

    run(scenario)
