"""When requests reach the thread that writes in groups."""

from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from metaq.fs.group_thread import GroupThread, post_to

TIMEOUT_S = 30.0


class Rig:
    """A thread that notes what it was given, and when it had done all."""

    def __init__(self) -> None:
        self.groups: SimpleQueue[list[int]] = SimpleQueue()
        self.idle: SimpleQueue[int] = SimpleQueue()
        self.left = 0
        """Pieces of work that are still to do for what was taken."""
        self.thread: GroupThread[int] = GroupThread("test", self._run, self.idle.put)

    def _run(self, requests: Sequence[int]) -> bool:
        self.groups.put(list(requests))
        self.left += sum(requests) - 1
        return self.left > 0

    def taken(self) -> list[list[int]]:
        """Return all that it was given so far."""
        return [self.groups.get() for _ in range(self.groups.qsize())]


def test_what_waits_is_taken_together_and_in_its_order() -> None:
    """Each piece of work is asked for until all is done; then it says so, once."""
    rig = Rig()
    rig.thread.submit(1, 1)
    rig.thread.submit(2)
    rig.thread.start()
    assert rig.idle.get(timeout=TIMEOUT_S) == 3
    assert rig.taken() == [[1, 1, 2], [], [], []]
    rig.thread.submit(1)
    assert rig.idle.get(timeout=TIMEOUT_S) == 4
    assert rig.taken() == [[1]]
    rig.thread.stop()
    rig.thread.join(TIMEOUT_S)
    assert rig.idle.empty()


def test_a_stop_lets_everything_before_it_run_and_reports_nothing() -> None:
    """Its owner may be gone by then."""
    rig = Rig()
    rig.thread.submit(1)
    rig.thread.submit(2)
    rig.thread.stop()
    rig.thread.start()
    rig.thread.join(TIMEOUT_S)
    assert rig.taken() == [[1, 2], [], []]
    assert rig.idle.empty()


class Loop:
    """A loop that notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call_soon(self, _task: object) -> None:
        self.calls.append("soon")

    def call_soon_threadsafe(self, _task: object) -> None:
        self.calls.append("from another thread")


def test_a_task_of_the_loops_own_thread_is_no_send_to_itself() -> None:
    """Those of other threads wake it."""
    loop: Any = Loop()
    post = post_to(loop)
    post(lambda: None)
    other = Thread(target=post, args=[lambda: None])
    other.start()
    other.join(TIMEOUT_S)
    assert loop.calls == ["soon", "from another thread"]
