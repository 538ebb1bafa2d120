"""When requests reach the thread that writes in groups."""

import random
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
    """It is handed over at once, again and again."""
    loop = Loop()
    loop.thread.start()
    for number in (1, 2):
        assert loop.rested.wait(TIMEOUT_S)
        loop.end_turn()
        loop.rested.clear()
        loop.submit(number)
        assert loop.next_group() == [number]
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


class Owner(Loop):
    """An owner that begins groups itself, until the test ends them."""

    def __init__(self, *, takes: Callable[[Sequence[int]], bool]) -> None:
        super().__init__()
        self.begun: list[list[int]] = []
        self.ends: list[Callable[[bool], None]] = []
        self._takes = takes
        self.thread = GroupThread(
            "test",
            self._run,
            self.rested.set,
            self.callbacks.append,
            self._begin,
        )

    def _begin(self, requests: Sequence[int], on_end: Callable[[bool], None]) -> bool:
        if not self._takes(requests):
            return False
        self.begun.append(list(requests))
        self.ends.append(on_end)
        return True

    def end(self, *, has_more: bool = False) -> None:
        self.ends.pop(0)(has_more)


def test_an_idle_threads_group_is_begun_by_its_owner() -> None:
    """The thread is not handed it, and what comes meanwhile is the next group."""
    owner = Owner(takes=lambda _group: True)
    owner.thread.start()
    owner.submit(1, 2, 3)
    owner.end_turn()
    assert owner.begun == [[1]]
    owner.end()
    assert owner.begun == [[1], [2, 3]]
    owner.submit(4)
    assert owner.begun[2:] == []
    owner.end()
    assert owner.begun[2:] == [[4]]
    owner.end_turn()
    owner.end()
    owner.submit(5)
    assert owner.begun[3:] == [[5]]
    owner.end()
    assert owner.finish() == []


def test_what_the_owner_does_not_begin_is_the_threads() -> None:
    """Also all that comes while it is at work; then the owner begins again."""
    owner = Owner(takes=lambda group: group[0] != 1)
    owner.submit(1)
    owner.submit(2)
    owner.end_turn()
    owner.thread.start()
    assert owner.next_group() == [1, 2]
    assert owner.rested.wait(TIMEOUT_S)
    owner.end_turn()
    owner.submit(3)
    assert owner.begun == [[3]]
    owner.end()
    assert owner.finish() == []


def test_the_owner_begins_nothing_before_it_has_heard_all_of_the_thread() -> None:
    """The thread reports by callbacks, which may come late."""
    owner = Owner(takes=lambda group: group[0] != 1)
    owner.submit(1)
    owner.thread.start()
    assert owner.next_group() == [1]
    assert owner.rested.wait(TIMEOUT_S)
    owner.submit(2)
    assert not owner.begun
    owner.end_turn()
    assert owner.begun == [[2]]
    owner.end()
    assert owner.finish() == []


def test_the_thread_goes_on_with_what_was_begun_before_others() -> None:
    """It is called without requests, then with those that were gathered."""
    owner = Owner(takes=lambda _group: True)
    owner.thread.start()
    owner.submit(1, 2)
    owner.end(has_more=True)
    assert owner.next_group() in ([], [2])
    assert owner.finish() in ([2], [])
    assert owner.begun == [[1]]


def test_an_end_waits_for_what_was_begun() -> None:
    """Requests gathered meanwhile are done by the thread before it ends."""
    owner = Owner(takes=lambda _group: True)
    owner.thread.start()
    owner.submit(1, 2)
    owner.thread.stop()
    assert owner.groups.empty()
    owner.end()
    assert owner.next_group() == [2]
    owner.thread.join(TIMEOUT_S)


def test_the_thread_rests_behind_what_was_begun() -> None:
    """Each time nothing follows for a while; never while something is under way."""
    owner = Owner(takes=lambda _group: True)
    owner.thread.start()
    for number in (1, 2):
        assert owner.rested.wait(TIMEOUT_S)
        owner.submit(number)
        owner.rested.clear()
        owner.end()
        owner.end_turn()
    assert owner.rested.wait(TIMEOUT_S)
    assert owner.finish() == []


def test_one_is_at_work_at_a_time_and_the_order_is_kept(rng: random.Random) -> None:
    """All that may do the groups: the owner, its thread, or one behind the other."""
    done: list[int] = []
    at_work: list[str] = []

    def run(requests: Sequence[int]) -> bool:
        at_work.append("thread")
        done.extend(requests)
        assert at_work == ["thread"]
        at_work.pop()
        return False

    ends: list[Callable[[bool], None]] = []
    callbacks: list[Callable[[], None]] = []

    def begin(requests: Sequence[int], on_end: Callable[[bool], None]) -> bool:
        if rng.random() < 0.4:
            return False
        at_work.append("owner")
        done.extend(requests)
        ends.append(on_end)
        return True

    thread: GroupThread[int] = GroupThread(
        "test", run, lambda: None, callbacks.append, begin
    )
    thread.start()

    def end() -> None:
        if ends:
            assert at_work == ["owner"]
            at_work.pop()
            ends.pop()(rng.random() < 0.2)

    for number in range(5000):
        thread.submit(number, joins=rng.random() < 0.1)
        if rng.random() < 0.3:
            end()
        if rng.random() < 0.5:
            turn, callbacks[:] = list(callbacks), []
            for callback in turn:
                callback()
    thread.stop()
    end()
    thread.join(TIMEOUT_S)
    assert done == list(range(5000))
