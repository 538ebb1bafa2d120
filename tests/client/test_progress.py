"""An idle log, a stuck partition and a slow handler are distinguished."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.consume import progress
from metaq.client.consume.fetch_buffer import FetchBuffer
from metaq.client.consume.fetched_batch import FetchedBatch
from metaq.client.consume.progress import (
    UNKNOWN_LAG,
    Lag,
    ReadStatus,
    Watchdog,
    may_be_stuck,
)
from metaq.errors import (
    ConnectionLostError,
    ForbiddenError,
    MetaqError,
    NoBrokerError,
    ServerError,
    UnavailableError,
)
from metaq.model import GroupOffset, Message, MessageId, Offset
from metaq.testing.clock import ManualClock
from tests.brokers import StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, take
from tests.rigs.inside import move_consumer
from tests.rigs.waiting import wait_until

ZERO, ONE = partition(0), partition(1)
BOUND_S = 60.0
BEGIN = GroupOffset(Offset(0), MessageId(-1))


class WaitedFor(FetchBuffer):
    """A buffer for which a worker waits, as long as the test says so."""

    is_waited_for = True

    @property
    def has_waiters(self) -> bool:
        return self.is_waited_for


class Bench:
    """A watchdog over a fetch buffer, a clock that is moved, and a broker that says
    `ends`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.fetch_buffer = WaitedFor(
            clock=self.clock,
            buffer_bytes_max=1000,
            buffer_count_max=10,
            on_room=lambda: None,
        )
        self.fetch_buffer.add(ZERO, BEGIN)
        self.ends: Any = (Offset(0), Offset(100))
        self.status: ReadStatus | None = ReadStatus(Offset(0), None)
        self.while_asked: Callable[[], None] = lambda: None
        self.questions = 0
        context: Any = SimpleNamespace(clock=self.clock)
        self.dog = Watchdog(
            context,
            self.fetch_buffer,
            group="g",
            bound_s=BOUND_S,
            status_of=lambda _partition: self.status,
            on_stuck=lambda _error: None,
        )
        log = SimpleNamespace(ends=self._ends, may_be_unopened=self._may_be_unopened)
        monkeypatch.setattr(progress, "LogQueries", lambda *_args: log)

    async def _ends(self) -> Any:
        self.questions += 1
        self.while_asked()
        if isinstance(self.ends, MetaqError):
            raise self.ends
        return self.ends

    async def _may_be_unopened(self) -> bool:
        return False

    def look(self, *, after_s: float = BOUND_S / 4) -> MetaqError | None:
        self.clock.advance_s(after_s)
        return asyncio.run(self.dog.look())

    def looks_until_alarm(self, most: int = 20) -> int | None:
        for count in range(1, most + 1):
            if self.look() is not None:
                return count
        return None


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def message(offset: int) -> Message:
    return Message(
        "test", b"", None, MessageId(1), ZERO, Offset(offset), Offset(offset + 20)
    )


def test_data_that_nobody_brings_is_told_within_one_and_a_half_bounds(
    bench: Bench,
) -> None:
    count = bench.looks_until_alarm()
    assert count is not None
    assert BOUND_S <= count * BOUND_S / 4 <= 1.5 * BOUND_S


def test_the_error_names_place_bound_and_log_end(bench: Bench) -> None:
    for _ in range(4):
        assert bench.look() is None
    error = bench.look()
    assert str(error) == (
        "test/0-0: no progress for 60 s (bound 60 s) at offset 0, although the log"
        " goes on to 100 and a reader waits; the last answer to a get was that nothing"
        " is there"
    )


def test_an_idle_log_is_no_alarm_and_data_behind_it_has_the_whole_bound(
    bench: Bench,
) -> None:
    bench.ends = (Offset(0), Offset(0))
    assert bench.looks_until_alarm(50) is None
    bench.ends = (Offset(0), Offset(100))
    count = bench.looks_until_alarm()
    assert count is not None
    assert count * BOUND_S / 4 >= BOUND_S


def test_a_message_handled_for_long_is_told_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handler is not disturbed; the next message has the whole bound again."""
    bench.fetch_buffer.is_waited_for = False
    bench.fetch_buffer.put(
        FetchedBatch(ZERO, [message(0), message(20)], Offset(40), 40)
    )
    batch = bench.fetch_buffer.take_nowait()
    assert batch is not None
    next(batch.begin())
    assert bench.looks_until_alarm(4) is None
    assert caplog.text == ""
    assert bench.looks_until_alarm(20) is None
    (line,) = caplog.messages
    assert line == (
        "message still being handled, its partition waits: group=g partition=test/0-0"
        " offset=0 duration_s=60"
    )
    next(batch.begin())
    assert bench.looks_until_alarm(4) is None
    assert len(caplog.messages) == 1
    assert bench.looks_until_alarm(4) is None
    assert "offset=20" in caplog.messages[1]
    batch.confirm()
    bench.fetch_buffer.done(batch)
    assert bench.looks_until_alarm(20) is None
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("ends", [None, NoBrokerError("away")])
def test_a_broker_that_cannot_say_is_no_alarm(bench: Bench, ends: Any) -> None:
    bench.ends = ends
    assert bench.looks_until_alarm() is None


def test_nobody_who_waits_is_no_alarm_and_nobody_is_asked(bench: Bench) -> None:
    for _ in range(3):
        assert bench.look() is None
    bench.fetch_buffer.is_waited_for = False
    questions = bench.questions
    assert bench.looks_until_alarm() is None
    assert bench.questions == questions
    bench.fetch_buffer.is_waited_for = True
    count = bench.looks_until_alarm()
    assert count is not None
    assert count >= 4  # the suspicion of before is forgotten


def test_a_place_behind_the_log_end_is_told_until_it_is_left(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The log was replaced: what is put now is passed over, with lag 0."""
    bench.fetch_buffer.fence(ZERO)
    bench.fetch_buffer.add(ZERO, replace(BEGIN, offset=Offset(460)))
    assert bench.looks_until_alarm() is None
    (problem,) = bench.dog.problems()
    assert "0-0: it is read at offset 460, beyond the log end 100" in problem
    bench.ends = None
    assert bench.looks_until_alarm() is None
    assert "beyond the log end 0" in bench.dog.problems()[0]
    assert len(caplog.records) == 1
    bench.ends = (Offset(0), Offset(460))
    bench.look()
    assert bench.dog.problems() == []


def test_a_place_behind_the_log_end_is_left_by_going_elsewhere(bench: Bench) -> None:
    bench.fetch_buffer.fence(ZERO)
    bench.fetch_buffer.add(ZERO, replace(BEGIN, offset=Offset(460)))
    bench.look()
    assert bench.dog.problems() != []
    bench.fetch_buffer.fence(ZERO)
    bench.fetch_buffer.add(ZERO, BEGIN)
    bench.look(after_s=0)
    assert bench.dog.problems() == []


def test_a_batch_that_is_taken_is_no_alarm(bench: Bench) -> None:
    bench.fetch_buffer.put(FetchedBatch(ZERO, [message(0)], Offset(20), 20))
    assert bench.fetch_buffer.take_nowait() is not None
    assert bench.looks_until_alarm() is None


@pytest.mark.parametrize(
    "error", [ServerError("no"), UnavailableError("no"), ConnectionLostError("cut")]
)
def test_gets_that_fail_again_and_again_are_no_progress(
    bench: Bench, error: MetaqError
) -> None:
    """Whatever they fail with: the broker says that there is data, and none comes."""
    bench.status = ReadStatus(Offset(0), error)
    count = bench.looks_until_alarm()
    assert count is not None
    assert BOUND_S <= count * BOUND_S / 4 <= 1.5 * BOUND_S


def test_a_question_cut_by_a_malformed_answer_to_a_get_clears_nobody(
    bench: Bench,
) -> None:
    """Both share a connection; what the broker said before still holds."""
    bench.status = ReadStatus(Offset(0), ConnectionLostError("malformed reply"))
    for _ in range(4):
        assert bench.look() is None
    bench.ends = ConnectionLostError("malformed reply")
    assert "malformed reply" in str(bench.look())


def test_the_error_tells_the_last_answer_of_the_broker(bench: Bench) -> None:
    bench.status = ReadStatus(Offset(0), ServerError("the disk cannot read it"))
    for _ in range(4):
        assert bench.look() is None
    assert str(bench.look()).endswith("; the last get failed: the disk cannot read it")


def test_a_partition_that_an_operator_closed_is_no_alarm(bench: Bench) -> None:
    bench.status = ReadStatus(Offset(0), ForbiddenError("closed"))
    assert bench.looks_until_alarm() is None


def test_a_broker_that_refuses_to_say_where_its_log_ends_has_said_it_before(
    bench: Bench,
) -> None:
    """It is there; one that never said so has no known data."""
    bench.ends = ServerError("no")
    assert bench.looks_until_alarm() is None
    bench.ends = (Offset(0), Offset(100))
    assert bench.look() is None
    bench.ends = ServerError("no")
    assert bench.looks_until_alarm() is not None


def test_a_partition_is_stuck_beside_one_that_flows(bench: Bench) -> None:
    """The only worker is never free when the watchdog looks."""
    bench.fetch_buffer.add(ONE, BEGIN)
    bench.fetch_buffer.is_waited_for = False
    found = []
    for _ in range(6):
        bench.fetch_buffer.put(
            FetchedBatch(ONE, [message(0)._replace(partition=ONE)], Offset(20), 20)
        )
        batch = bench.fetch_buffer.take_nowait()
        assert batch is not None
        found.append(bench.look())
        next(batch.begin())
        batch.confirm()
        bench.fetch_buffer.done(batch)
    assert any(str(one).startswith("test/0-0: no progress") for one in found)


def test_a_part_of_a_large_message_is_progress(bench: Bench) -> None:
    for count in range(20):
        bench.status = ReadStatus(Offset(count), None)
        assert bench.look() is None


QUIET: dict[str, Any] = {
    "status": ReadStatus(Offset(0), None),
    "is_taken": False,
    "is_buffered": False,
    "has_room": True,
    "has_waiters": True,
    "is_wanted": True,
}
REFUSED = ReadStatus(Offset(0), ServerError("no"))
CLOSED = ReadStatus(Offset(0), ForbiddenError("closed"))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"status": REFUSED}, True),
        ({"status": CLOSED}, False),
        ({"is_taken": True}, False),
        ({"is_taken": True, "status": REFUSED}, False),
        ({"is_buffered": True}, True),
        ({"is_buffered": True, "has_waiters": False}, False),
        ({"has_waiters": False}, True),
        ({"has_waiters": False, "has_room": False}, False),
        ({"has_waiters": False, "is_wanted": False}, False),
    ],
)
def test_what_stands_still_and_should_not(change: dict[str, Any], wanted: bool) -> None:
    """The whole decision, a row each."""
    assert may_be_stuck(**(QUIET | change)) is wanted


@given(
    status=st.sampled_from([QUIET["status"], REFUSED]),
    has_room=st.booleans(),
    is_buffered=st.booleans(),
)
def test_a_worker_that_waits_with_nothing_taken_is_never_overlooked(
    status: ReadStatus, has_room: bool, is_buffered: bool
) -> None:
    """Refusals and full buffers are no excuse."""
    change = {"status": status, "has_room": has_room, "is_buffered": is_buffered}
    assert may_be_stuck(**(QUIET | change))


def test_progress_clears_the_suspicion(bench: Bench) -> None:
    for _ in range(20):
        for _ in range(3):
            assert bench.look() is None
        bench.fetch_buffer.put(FetchedBatch(ZERO, [], Offset(1), 0))


def test_progress_while_the_broker_is_asked_clears_it_too(bench: Bench) -> None:
    for _ in range(4):
        assert bench.look() is None
    bench.while_asked = lambda: bench.fetch_buffer.put(
        FetchedBatch(ZERO, [], Offset(1), 0)
    )
    assert bench.look() is None


def test_a_partition_that_goes_meanwhile_is_no_alarm(bench: Bench) -> None:
    for _ in range(4):
        assert bench.look() is None
    bench.while_asked = lambda: bench.fetch_buffer.fence(ZERO) and None
    assert bench.look() is None


def test_one_of_several_partitions_is_named(bench: Bench) -> None:
    bench.fetch_buffer.add(ONE, GroupOffset(Offset(100), MessageId(-1)))
    for _ in range(4):
        assert bench.look() is None
    assert str(bench.look()).startswith("test/0-0: ")


# -- with a broker --------------------------------------------------------------------


ONE_BROKER = {"java": "the log's start moves"}


@pytest.fixture
def broker(start_broker: StartBroker) -> Any:
    return start_broker()


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, broker: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[broker.address], **QUICK) as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def java_client(request: pytest.FixtureRequest, java: Any) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[java.address], **QUICK) as one:
        yield one


@pytest.mark.slow
def test_a_partition_that_an_operator_closed_does_not_end_the_consumer(
    broker: Any,
    client: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`health` and one line of the log report it, however long it lasts."""
    broker.put(b"m")
    broker.close_partition()
    with client.consumer("g", ["test"], watchdog_s=1.0, **IDLE) as consumer:
        assert consumer.receive(2.0) is None
        assert len(consumer.health().problems) == 1
        assert caplog.text.count("get failed") == 1
        broker.open_partition()
        assert consumer.receive(30).data == b"m"


@pytest.mark.slow
def test_health_tells_of_a_place_behind_the_log_end(
    broker: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.put(b"m")
    with client.consumer("g", ["test"], watchdog_s=1.0, **IDLE) as consumer:
        assert consumer.receive(30).data == b"m"
        move_consumer(consumer, ZERO, Offset(1_000_000))
        # What no reader has asked for within the bound is not looked at.
        wait_until(lambda: consumer.receive(0) or consumer.health().problems)
        assert consumer.receive(0) is None
        (problem,) = consumer.health().problems
        assert "test/0-0: it is read at offset 1000000, beyond the log end" in problem
        assert not consumer.health().is_ok
        assert caplog.text.count("beyond its log end") == 1
        consumer.seek(ZERO, Offset(0))
        assert consumer.receive(30).data == b"m"
        wait_until(lambda: consumer.health().is_ok)


def test_lag_of_a_log_whose_start_moved_counts_from_there(
    java: Any, java_client: Any
) -> None:
    java.put(b"aa", b"bb")
    with java_client.consumer(
        "g", ["test"], commit_interval_s=None, **IDLE
    ) as consumer:
        take(consumer, 2)
        java.inner.close_partition()
        wait_until(lambda: consumer.health().problems)
        java.inner.roll()
        (start,) = java.put(b"cc")
        java.inner.trim()
        lag = consumer.lag()[ZERO]
        assert lag.bytes == java.inner.log_end() - start
        assert lag.messages is None


def test_lag_behind_the_log_end_is_not_known(broker: Any, client: Any) -> None:
    """The log was replaced: zero would say that everything was handled."""
    broker.put(b"m")
    options = {"watchdog_s": None, "commit_interval_s": None, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        take(consumer, 1)
        move_consumer(consumer, ZERO, Offset(1_000_000))
        assert consumer.lag()[ZERO] == UNKNOWN_LAG
        consumer.seek(ZERO, Offset(0))
        assert consumer.lag()[ZERO].bytes != 0


@pytest.mark.parametrize(
    ("handled", "ends", "found"),
    [
        (0, None, Lag(0, 0, 0.0)),
        (0, (0, 0), Lag(0, 0, 0.0)),
        (100, (60, 100), Lag(0, 0, 0.0)),
        (40, (100, 100), Lag(0, 0, 0.0)),
        (101, (60, 100), UNKNOWN_LAG),
        (1, None, UNKNOWN_LAG),
    ],
)
def test_lag_at_the_ends_of_a_log(
    bench: Bench, handled: int, ends: Any, found: Lag
) -> None:
    bench.ends = ends
    context: Any = SimpleNamespace(clock=bench.clock)
    handled_to = {ZERO: GroupOffset(Offset(handled))}
    lags = asyncio.run(progress.lags_of(context, handled_to, deadline_s=60.0))
    assert lags == {ZERO: found}


@pytest.mark.slow
def test_lag_raises_when_the_broker_is_away(broker: Any, client: Any) -> None:
    with client.consumer("g", ["test"], **IDLE) as consumer:
        wait_until(consumer.assignment)
        broker.stop()
        with pytest.raises(MetaqError):
            consumer.lag(0.05)
        broker.start()
        wait_until(lambda: consumer.health().is_ok)
