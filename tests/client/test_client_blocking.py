"""Peculiarities of the sync world: threads, forks, interrupts, leaks."""

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from metaq.client import Client, FileOffsets
from metaq.client.errors import OutcomeUnknownError
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.client.sync.client import OPEN_CLIENTS, close_open_clients
from metaq.errors import ClosedError, MetaqError
from metaq.model import Message, Offset
from metaq.testing.fake_broker import FaultKind
from tests.brokers import AnyBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, partition, parts_of, payloads, take
from tests.rigs.inside import loop_thread_of, twin_of
from tests.rigs.waiting import wait_until

ONE_BROKER = {"java": "an answer that is late"}
ZERO = partition(0)


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker()


@pytest.fixture
def java(start_metaq_1_4: StartBroker) -> Any:
    return start_metaq_1_4()


@pytest.fixture
def client(broker: AnyBroker) -> Iterator[Client]:
    with Client(brokers=[broker.address], **QUICK) as one:
        yield one


class Caller:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def join(self) -> Any:
        self._thread.join(20)
        assert not self._thread.is_alive(), "the call did not come back"
        if self.error is not None:
            raise self.error
        return self.result

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


# -- threads --------------------------------------------------------------------------


def test_any_thread_may_read_one_after_the_other(
    broker: AnyBroker, client: Client
) -> None:
    broker.put(*(b"%d" % n for n in range(6)))
    found: list[Message] = []
    with client.consumer("g", ["test"], **IDLE) as consumer:
        for _ in range(3):
            found += Caller(lambda: take(consumer, 2)).join()
    assert payloads(found) == [b"%d" % n for n in range(6)]


def test_closing_ends_a_loop_that_waits_in_another_thread(
    broker: AnyBroker, client: Client
) -> None:
    broker.put(b"0")
    consumer = client.consumer("g", ["test"], **IDLE)
    consumer.start()
    found: list[bytes] = []

    def loop() -> None:
        found.extend(message.data for message in consumer)

    reader = Caller(loop)
    wait_until(lambda: found == [b"0"])
    consumer.close()
    reader.join()
    assert found == [b"0"]


def test_closing_waits_for_a_message_that_another_thread_handles(
    broker: AnyBroker, client: Client
) -> None:
    """It is handled once: its offset is committed, and the next one not handed out."""
    broker.put(b"0", b"1", b"2")
    store = MemoryOffsets()
    consumer = client.consumer("g", ["test"], offsets=store, **IDLE)
    consumer.start()
    at_work, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def loop() -> None:
        for message in consumer:
            found.append(message.data)
            at_work.set()
            go_on.wait(20)

    reader = Caller(loop)
    assert at_work.wait(20)
    closing = Caller(consumer.close)
    wait_until(lambda: not consumer.assignment())
    client.partitions("test")  # the loop has gone on, and begun to wait for it
    assert not closing.is_over
    go_on.set()
    closing.join()
    reader.join()
    assert found == [b"0"]
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 2)) == [b"1", b"2"]


def test_closing_waits_no_longer_than_it_was_told_to(
    broker: AnyBroker, client: Client
) -> None:
    broker.put(b"0", b"1")
    store = MemoryOffsets()
    options: dict[str, Any] = {"offsets": store, "revoke_timeout_s": 0.05, **IDLE}
    consumer = client.consumer("g", ["test"], **options)
    consumer.start()
    at_work, go_on = threading.Event(), threading.Event()

    def loop() -> None:
        for _message in consumer:
            at_work.set()
            go_on.wait(20)

    reader = Caller(loop)
    assert at_work.wait(20)
    Caller(consumer.close).join()
    go_on.set()
    reader.join()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 2)) == [b"0", b"1"]


def test_the_end_of_a_block_does_not_count_what_another_thread_handles(
    broker: AnyBroker, client: Client
) -> None:
    broker.put(b"0", b"1")
    store = MemoryOffsets()
    options: dict[str, Any] = {"offsets": store, "revoke_timeout_s": 0.05, **IDLE}
    at_work, go_on = threading.Event(), threading.Event()
    with client.consumer("g", ["test"], **options) as consumer:

        def loop() -> None:
            for _message in consumer:
                at_work.set()
                go_on.wait(20)

        reader = Caller(loop)
        assert at_work.wait(20)
    go_on.set()
    reader.join()
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert take(consumer, 1)[0].data == b"0"


def test_closing_inside_the_loop_ends_it_at_once(
    broker: AnyBroker, client: Client
) -> None:
    """The message being handled is the caller's own: there is no wait."""
    broker.put(b"0", b"1")
    store = MemoryOffsets()
    consumer = client.consumer(
        "g", ["test"], offsets=store, revoke_timeout_s=3600, **IDLE
    )
    consumer.start()
    found = []

    def loop() -> None:
        for message in consumer:
            found.append(message.data)
            consumer.close()

    Caller(loop).join()
    assert found == [b"0"]
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert take(consumer, 1)[0].data == b"0"


def test_closing_the_client_inside_a_loop_does_not_wait_for_itself(
    broker: AnyBroker,
) -> None:
    broker.put(b"0", b"1")
    client = Client(brokers=[broker.address], **QUICK)
    client.start()
    consumer = client.consumer("g", ["test"], revoke_timeout_s=3600, **IDLE)
    consumer.start()
    found = []

    def loop() -> None:
        for message in consumer:
            found.append(message.data)
            client.close()

    Caller(loop).join()
    assert found == [b"0"]
    with pytest.raises(ClosedError):
        consumer.receive(1)


@pytest.mark.slow
def test_statistics_may_be_asked_while_partitions_come_and_go(
    broker: AnyBroker, client: Client
) -> None:
    over = threading.Event()

    with client.consumer("g", ["test", "many"], **IDLE) as consumer:

        def ask() -> None:
            while not over.is_set():
                consumer.health()
                consumer.statistics()
                consumer.assignment()

        asking = Caller(ask)
        broker.create_topic("many", 100)
        broker.put(b"m", topic="many", partition=99)
        wait_until(lambda: len(consumer.assignment()) == 101)
        over.set()
        asking.join()


def test_a_blocking_call_on_the_client_s_own_thread_is_refused(
    broker: AnyBroker, client: Client
) -> None:
    broker.put(b"0")
    errors: list[BaseException] = []

    def accept(_message: Message) -> bool:
        try:
            client.topics()
        except ClosedError as error:
            errors.append(error)
        return True

    with client.consumer("g", ["test"], message_filter=accept, **IDLE) as consumer:
        take(consumer, 1)
    assert "would wait for itself" in str(errors[0])


# -- life -----------------------------------------------------------------------------


def test_a_client_that_is_closed_or_not_started_says_so(broker: AnyBroker) -> None:
    client = Client(brokers=[broker.address], **QUICK)
    with pytest.raises(ClosedError, match="not started"):
        client.consumer("g", ["test"])
    with pytest.raises(ClosedError, match="not started"):
        client.topics()
    client.close()
    with client, pytest.raises(ClosedError, match="started only once"):
        client.start()
    client.close()
    with pytest.raises(ClosedError, match="closed"):
        client.consumer("g", ["test"])
    with pytest.raises(ClosedError, match="started only once"):
        client.start()


def test_a_client_that_cannot_start_leaves_no_thread() -> None:
    def refuse(_clock: object) -> Any:
        raise MetaqError("no ZooKeeper here")

    before = set(threading.enumerate())
    with pytest.raises(MetaqError, match="no ZooKeeper here"):
        Client(coordinator=refuse).start()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.slow
def test_a_call_has_a_timeout(broker: AnyBroker) -> None:
    # A client that asked its brokers often would know that there is none to be asked.
    with Client(brokers=[broker.address], **{**QUICK, "metadata_s": 30.0}) as client:
        client.partitions("test")
        broker.stop()
        with pytest.raises(MetaqError, match="tried for"):
            client.stats(timeout=0.3)
        with pytest.raises(MetaqError):
            client.get("test", "0-0", 0, timeout=0.05)  # type: ignore[arg-type]  # an int


@pytest.mark.slow
def test_nothing_leaks_from_clients_that_come_and_go(broker: AnyBroker) -> None:
    broker.put(*(b"%d" % n for n in range(10)))

    def use() -> None:
        with Client(brokers=[broker.address], **QUICK) as client:
            with client.consumer("g", ["test"], **IDLE) as consumer:
                take(consumer, 3)
            next(client.browse("test"))

    use()
    gc.collect()
    threads, descriptors = threading.active_count(), _descriptors()
    for _ in range(5):
        use()
    gc.collect()
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: _descriptors() <= descriptors)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_leaks_from_consumers_that_come_and_go(
    broker: AnyBroker, client: Client
) -> None:
    """One client, many consumers: those that are closed are forgotten."""
    broker.put(b"0")
    for _ in range(5):
        with client.consumer("g", ["test"], **IDLE) as consumer:
            take(consumer, 1)
        with client.producer():
            pass
    client.producer()
    assert len(twin_of(client)._children) == 1
    assert len(parts_of(client).metadata._listeners) <= 2  # type: ignore[attr-defined]  # by address


@pytest.mark.slow
def test_closing_the_client_ends_calls_that_wait_in_other_threads(
    broker: AnyBroker,
) -> None:
    client = Client(brokers=[broker.address], **QUICK)
    client.start()
    waiting = threading.Event()
    broker.put(b"0")

    def browse() -> None:
        for _message in client.browse("test", stop_at_end=False):
            waiting.set()

    calls = [Caller(browse), Caller(lambda: client.producer().send("none", b"m"))]
    assert waiting.wait(20)
    client.close(timeout=0.2)
    for call in calls:
        with pytest.raises(MetaqError):
            call.join()


def test_a_close_that_meets_the_client_s_own_raises_nothing(
    java: Any,
) -> None:
    """An object that a thread closes at the end of its block may be closed by then."""
    client = Client(brokers=[java.address], **QUICK, close_timeout_s=3600)
    client.start()
    sending = threading.Event()

    def send() -> Exception | None:
        with client.producer(timeout_s=3600) as producer:
            producer.send("test", b"0")
            java.inner.inject(FaultKind.SWALLOW)
            future = producer.send_nowait("test", b"1")
            sending.set()
        return future.exception(0)

    sender = Caller(send)
    assert sending.wait(20)
    # The end of its block waits for an answer that never comes.
    wait_until(lambda: not client.statistics().producers)
    client.close(timeout=0.05)
    assert isinstance(sender.join(), OutcomeUnknownError)


def test_a_thread_that_ended_in_its_loop_is_not_waited_for(
    broker: AnyBroker, client: Client
) -> None:
    """Its exception keeps its loop alive; its message is not handled."""
    broker.put(b"0", b"1")
    store = MemoryOffsets()
    options: dict[str, Any] = {"offsets": store, **IDLE}
    consumer = client.consumer("g", ["test"], revoke_timeout_s=3600, **options)
    consumer.start()

    def loop() -> None:
        for _message in consumer:
            raise ValueError("kept")

    reader = Caller(loop)
    with pytest.raises(ValueError, match="kept"):
        reader.join()
    Caller(consumer.close).join()
    with client.consumer("g", ["test"], **options) as consumer:
        assert take(consumer, 1)[0].data == b"0"


def test_closing_on_the_client_s_own_thread_is_refused_and_closes_nothing(
    broker: AnyBroker, client: Client
) -> None:
    errors: list[BaseException] = []

    def close(_future: object) -> None:
        try:
            client.close()
        except ClosedError as error:
            errors.append(error)

    with client.producer() as producer:
        producer.send_nowait("test", b"0").add_done_callback(close)
        wait_until(lambda: errors)
        producer.send("test", b"1")
    assert "would wait for itself" in str(errors[0])


# -- forks and signals ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_in_the_child_of_a_fork_every_call_says_so(java: Any) -> None:
    java.put(b"0", b"1")
    java.inner.delay_s = 0.5
    with (
        Client(brokers=[java.address], **QUICK) as client,
        client.consumer("g", ["test"], **IDLE) as consumer,
        client.producer() as out,
    ):
        take(consumer, 1)
        future = out.send_nowait("test", b"2")
        calls: dict[str, Callable[[], Any]] = {
            "iterate": lambda: next(iter(consumer)),
            "receive": lambda: consumer.receive(1),
            "commit": consumer.commit,
            "lag": consumer.lag,
            "consumer": lambda: client.consumer("h", ["test"]),
            "producer": client.producer,
            "browse": lambda: next(client.browse("test")),
            "send": lambda: out.send("test", b"x"),
            "result": future.result,
            "exception": future.exception,
            "topics": client.topics,
            "health": consumer.health,
            "statistics": consumer.statistics,
            "assignment": consumer.assignment,
            "is_closed": lambda: consumer.is_closed,
            "seek": lambda: consumer.seek(ZERO, Offset(0)),
            "producer statistics": out.statistics,
            "producer is_closed": lambda: out.is_closed,
            "send_nowait": lambda: out.send_nowait("test", b"x"),
            "send_oneway": lambda: out.send_oneway("test", b"x"),
            "flush": out.flush,
        }
        wrong = in_child(calls)
        assert wrong == []
        java.inner.delay_s = 0.0
        assert future.result(20).offset > 0
        assert take(consumer, 1)[0].data == b"1"  # the parent goes on


def test_no_call_in_the_child_of_a_fork_waits_for_a_lock_of_the_parent(
    broker: AnyBroker, client: Client, tmp_path: Path
) -> None:
    """The lock's holder at the time of the copy is not there to release it."""
    broker.put(b"0")
    ordered = client.ordered_producer("test", "0:1", tmp_path)
    with (
        client.consumer("g", ["test"], **IDLE) as consumer,
        client.producer() as out,
        ordered,
    ):
        take(consumer, 1)
        future = out.send_nowait("test", b"1")
        assert future.result(20)
        locks: list[Any] = [
            twin_of(consumer).fetch_buffer._lock,
            twin_of(out).accumulator.buffer.lock,
            loop_thread_of(client)._entry,
            *(queue.spool._lock for queue in twin_of(ordered)._queues.values()),
        ]
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                let_go.wait(20)

        holder = Caller(hold)
        assert held.wait(20)
        calls: dict[str, Callable[[], Any]] = {
            "health": consumer.health,
            "statistics": consumer.statistics,
            "assignment": consumer.assignment,
            "is_closed": lambda: consumer.is_closed,
            "receive": lambda: consumer.receive(1),
            "run": lambda: consumer.run(print),
            "commit": consumer.commit,
            "producer statistics": out.statistics,
            "producer is_closed": lambda: out.is_closed,
            "send": lambda: out.send("test", b"x"),
            "send_oneway": lambda: out.send_oneway("test", b"x"),
            "ordered send": lambda: ordered.send(b"x"),
            "ordered statistics": ordered.statistics,
            "ordered is_closed": lambda: ordered.is_closed,
            "closing": lambda: (
                [one.close() for one in (consumer, out, ordered, client)]
                and client.topics()
            ),
        }
        try:
            assert in_child(calls) == []
        finally:
            let_go.set()
        holder.join()


def test_a_client_that_was_closed_before_a_fork_waits_for_no_lock_either(
    broker: AnyBroker,
) -> None:
    client = Client(brokers=[broker.address], **QUICK)
    client.start()
    consumer = client.consumer("g", ["test"], **IDLE)
    client.close()
    with twin_of(consumer).fetch_buffer._lock:
        assert in_child({"health": consumer.health}) == []


def in_child(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Return the names of calls that do not raise ClosedError in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        wrong = []
        for name, call in calls.items():
            # A call that waits for ever is ended, and seen by its missing line.
            signal.alarm(20)
            try:
                call()
                wrong.append(name)
            except ClosedError:
                continue
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
        os.write(writing, ",".join(wrong).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "a call did not come back"
    return [name for name in text.split(",") if name]


PROGRAM = """
import sys
from metaq.client import Client
with Client(brokers=[sys.argv[1]], metadata_s=0.05) as client:
    with client.consumer("g", ["test"], idle_max_s=0.02) as consumer:
        print("ready", flush=True)
        for message in consumer:
            print(message.data.decode(), flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_ends_a_program_that_waits_for_messages(
    broker: AnyBroker,
) -> None:
    broker.put(b"first")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, broker.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGINT)
        _out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in errors


FORGETFUL = """
import sys
from metaq.client import Client, FileOffsets
client = Client(brokers=[sys.argv[1]], metadata_s=0.05)
client.start()
consumer = client.consumer(
    "g",
    ["test"],
    offsets=FileOffsets(sys.argv[2]),
    idle_max_s=0.02,
    revoke_timeout_s=3600,
)
consumer.start()
print(consumer.receive(20).data.decode(), flush=True)
consumer.receive(20)
"""


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_by_itself_and_commits(
    broker: AnyBroker, client: Client, tmp_path: Path
) -> None:
    broker.put(b"first", b"second")
    path = tmp_path / "offsets.json"
    assert run_to_its_end(FORGETFUL, broker, path) == ("first\n", "")
    store = FileOffsets(path)
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == [b"second"]


def run_to_its_end(program: str, broker: AnyBroker, path: Path) -> tuple[str, str]:
    """Run a program with two arguments; return what it printed, and its complaints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, broker.address, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return done.stdout, done.stderr


WITH_SPOOLS = """
import sys, threading
from metaq.client import Client, RetryPolicy
client = Client(brokers=[sys.argv[1]], metadata_s=0.05)
client.start()
ordered = client.ordered_producer("test", "7:1", sys.argv[2] + "/ordered")
ordered.start()
print(type(ordered.send(b"m")).__name__, flush=True)
consumer = client.consumer("g", ["test"])
consumer.start()
is_handled = threading.Event()
retry = RetryPolicy(attempts_max=1, then="park", park_dir=sys.argv[2] + "/parked")
options = {"retry": retry, "timeout": 3600}
run = lambda: consumer.run(lambda _message: is_handled.set(), **options)
threading.Thread(target=run, daemon=True).start()
assert is_handled.wait(20)
"""


@pytest.mark.slow
def test_a_program_that_forgets_what_it_spools_ends_without_a_word(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """No thread begins then: files are closed where their owner is."""
    broker.put(b"0")
    assert run_to_its_end(WITH_SPOOLS, broker, tmp_path) == ("Spooled\n", "")


def test_a_program_s_end_knows_of_open_clients_alone(
    broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each function that is registered and taken back, CPython keeps a place."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    before = list(OPEN_CLIENTS)
    for _ in range(3):
        with Client(brokers=[broker.address], **QUICK) as client:
            assert list(OPEN_CLIENTS) == [*before, client]
    assert (registered, list(OPEN_CLIENTS)) == ([], before)


def test_a_client_that_cannot_be_closed_at_the_end_stops_no_other(
    broker: AnyBroker,
) -> None:
    """The newest first, as they would be closed by their blocks."""
    closed: list[Client] = []

    class Noted(Client):
        def close(self, *words: Any, **named: Any) -> None:
            closed.append(self)
            super().close(*words, **named)
            if self is clients[1]:
                raise OSError("as the test says")

    clients = [Noted(brokers=[broker.address], **QUICK) for _ in range(3)]
    with mock.patch.dict(OPEN_CLIENTS, clear=True):
        for client in clients:
            client.start()
        with pytest.raises(OSError, match="as the test says"):
            close_open_clients()
        assert closed == clients[::-1]
        assert not OPEN_CLIENTS
