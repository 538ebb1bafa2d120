"""When requests reach the thread that writes in groups."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event

from metaq.fs.group_thread import GroupThread

TIMEOUT_S = 30.0


class Loop:
    """Turns of the owner's loop, which end when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.groups: SimpleQueue[list[int]] = SimpleQueue()
        self.rested = Event()
        self.thread: GroupThread[int] = GroupThread(
            "test", self._run, self.rested.set, self.callbacks.append
        )

    def _run(self, requests: Sequence[int]) -> bool:
        self.groups.put(list(requests))
        return False

    def end_turn(self) -> None:
        callbacks, self.callbacks[:] = list(self.callbacks), []
        for callback in callbacks:
            callback()

    def submit(self, *requests: int) -> None:
        for request in requests:
            self.thread.submit(request)

    def next_group(self) -> list[int]:
        return self.groups.get(timeout=TIMEOUT_S)

    def finish(self) -> list[int]:
        """End the thread, and return what it was handed since."""
        self.thread.stop()
        self.thread.join(TIMEOUT_S)
        rest = []
        while not self.groups.empty():
            rest += self.groups.get()
        return rest


def test_a_request_that_finds_the_thread_idle_does_not_wait() -> None:
    """It is handed over at once, again and again, and no callback is asked for."""
    loop = Loop()
    loop.thread.start()
    for number in (1, 2):
        assert loop.rested.wait(TIMEOUT_S)
        loop.rested.clear()
        loop.submit(number)
        assert loop.next_group() == [number]
    assert not loop.callbacks
    assert loop.finish() == []


def test_what_comes_while_it_is_at_work_waits_for_the_end_of_the_turn() -> None:
    """The thread is not woken for each of them, and they keep their order."""
    loop = Loop()
    loop.submit(1, 2, 3)
    loop.thread.start()
    assert loop.next_group() == [1]
    assert loop.rested.wait(TIMEOUT_S)
    loop.submit(4)
    assert loop.groups.empty()
    loop.end_turn()
    assert loop.finish() == [2, 3, 4]


def test_a_request_that_joins_waits_for_those_of_its_turn() -> None:
    """Also one that finds the thread idle: the first would be a group of its own."""
    loop = Loop()
    loop.thread.start()
    assert loop.rested.wait(TIMEOUT_S)
    for number in (1, 2, 3):
        loop.thread.submit(number, joins=True)
    assert loop.groups.empty()
    loop.end_turn()
    assert loop.finish() == [1, 2, 3]


def test_the_end_hands_over_what_was_gathered() -> None:
    """Nothing that was submitted is left behind."""
    loop = Loop()
    loop.submit(1, 2)
    loop.thread.stop()
    loop.thread.start()
    assert loop.next_group() == [1, 2]
    loop.thread.join(TIMEOUT_S)


def test_without_callbacks_nothing_is_gathered() -> None:
    """An owner without a loop hands over each request as it comes."""
    groups: SimpleQueue[list[int]] = SimpleQueue()

    def run(requests: Sequence[int]) -> bool:
        groups.put(list(requests))
        return False

    thread: GroupThread[int] = GroupThread("test", run, lambda: None)
    for request in (1, 2, 3):
        thread.submit(request)
    thread.start()
    assert groups.get(timeout=TIMEOUT_S) == [1, 2, 3]
    thread.stop()
    thread.join(TIMEOUT_S)
