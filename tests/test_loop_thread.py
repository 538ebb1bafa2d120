"""The client's own loop: waits for it end, whatever happens to it."""

import asyncio
import concurrent.futures
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from metaq import loop_thread
from metaq.errors import ClosedError, NoResourcesError, RequestTimeoutError
from metaq.loop_thread import LoopThread
from tests.rigs.threads import refused_threads
from tests.rigs.waiting import wait_until


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    one = LoopThread("test")
    yield one
    one.stop()


async def answer() -> int:
    return 42


def test_it_runs_a_coroutine_and_returns_its_result(thread: LoopThread) -> None:
    assert thread.run(answer()) == 42


@pytest.mark.slow
def test_at_the_end_of_its_time_a_coroutine_is_cancelled(thread: LoopThread) -> None:
    """Also one that has not begun by then."""
    work = asyncio.Event().wait()
    with pytest.raises(RequestTimeoutError, match=r"not done within 0\.2 s"):
        thread.run(work, timeout_s=0.2)
    wait_until(lambda: inspect.getcoroutinestate(work) == inspect.CORO_CLOSED)


def test_a_coroutine_that_is_not_waited_for_is_cancelled_with_its_future(
    thread: LoopThread,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = thread.begin(wait())
    assert begun.wait(30)
    assert future.cancel()
    assert ended.wait(30)


def test_a_coroutine_that_is_cancelled_on_the_loop_cancels_its_future(
    thread: LoopThread,
) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        thread.begin(give_up()).result(30)


def test_an_end_of_the_program_in_a_coroutine_reaches_its_caller_alone(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        thread.run(leave())
    assert thread.run(answer()) == 42
    assert "asked for the end of the program" in caplog.text


def test_a_callback_that_wants_to_end_the_program_ends_nothing_here(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """`sys.exit` in a user's callback: else waits for the loop would go on for ever."""
    thread.loop.call_soon_threadsafe(sys.exit, "enough")
    assert thread.run(answer()) == 42
    assert "enough" in caplog.text


def test_a_stop_ends_the_wait_of_every_other_thread(thread: LoopThread) -> None:
    """The awaited work is cancelled, as it would never be finished."""
    begun = threading.Barrier(3)
    errors: list[BaseException] = []

    def call() -> None:
        async def wait() -> None:
            await asyncio.to_thread(begun.wait, 20)
            await asyncio.Event().wait()

        try:
            thread.run(wait())
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    begun.wait(30)
    thread.stop()
    for caller in callers:
        caller.join(30)
    assert [type(error) for error in errors] == [ClosedError, ClosedError]


def test_after_a_stop_nothing_runs(thread: LoopThread) -> None:
    thread.stop()
    thread.stop()
    with pytest.raises(ClosedError, match="closed"):
        thread.run(answer())
    assert thread.loop.is_closed()


def test_an_end_in_the_last_moment_is_no_time_out(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateQueue:
        """Has its entry when the time of the wait is over."""

        def __init__(self) -> None:
            self._inner: SimpleQueue[Any] = SimpleQueue()
            self.put, self.get_nowait = self._inner.put, self._inner.get_nowait

        def get(self, timeout: float) -> Any:
            assert timeout == 0.01
            self.put(self._inner.get(timeout=20))
            raise Empty

    monkeypatch.setattr(loop_thread, "SimpleQueue", LateQueue)
    assert thread.run(answer(), timeout_s=0.01) == 42


class BothAtOnce:
    """A lock that two threads want before either has it."""

    def __init__(self) -> None:
        self._barrier, self._lock = threading.Barrier(2), threading.Lock()

    def __enter__(self) -> None:
        self._barrier.wait(30)
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def test_two_threads_that_stop_it_at_once_stop_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second would ask a loop that may be closed by then."""
    thread = LoopThread("test")
    asked: list[object] = []
    ask = thread.loop.call_soon_threadsafe

    def count(callback: Any) -> Any:
        asked.append(callback)
        return ask(callback)

    monkeypatch.setattr(thread.loop, "call_soon_threadsafe", count)
    monkeypatch.setattr(thread, "_entry", BothAtOnce())
    stoppers = [threading.Thread(target=thread.stop) for _ in range(2)]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join(30)
    assert asked == [thread.loop.stop]


@pytest.mark.slow
def test_whatever_is_asked_while_it_stops_comes_to_an_end() -> None:
    for _ in range(50):
        thread = LoopThread("test")
        go = threading.Barrier(2)
        ends: list[object] = []

        def call(
            thread: LoopThread = thread,
            go: threading.Barrier = go,
            ends: list[object] = ends,
        ) -> None:
            go.wait(30)
            try:
                ends.append(thread.run(answer()))
            except ClosedError as error:
                ends.append(error)

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        go.wait(30)
        thread.stop()
        caller.join(30)
        assert ends


@pytest.mark.slow
@pytest.mark.parametrize("left", range(4))
def test_without_descriptors_it_says_so_and_leaves_nothing_open(left: int) -> None:
    """In one sentence, and a later try succeeds."""
    script = f"""
import logging, os, resource
from metaq.client import Client
from metaq.errors import MetaqError

# In this mode it warns of callbacks that take 0.1 s, as on a busy machine.
logging.getLogger("asyncio").setLevel(logging.ERROR)
count = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (count + {left}, count + 9))
held = []
while True:
    try:
        held.append(os.dup(0))
    except OSError:
        break
for _ in range({left}):
    os.close(held.pop())
before = os.listdir("/proc/self/fd") if {left} else []
client = Client(brokers=["127.0.0.1:1"])
try:
    client.start()
except MetaqError as error:
    assert "Too many open files" in str(error), error
    assert not {left} or os.listdir("/proc/self/fd") == before
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 9, count + 9))
    client.start()
client.close()
print("closed")
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("closed\n", "")


def test_without_a_thread_it_says_so() -> None:
    with (
        refused_threads(lambda _thread: True),
        pytest.raises(NoResourcesError, match="test: no thread can begin"),
    ):
        LoopThread("test")
