"""When requests reach the thread that writes in groups."""

import asyncio
from collections.abc import Sequence
from queue import SimpleQueue
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


def test_tasks_of_all_threads_run_on_the_loop_in_their_order() -> None:
    """Those of its own thread are no sends to itself."""

    async def scenario() -> tuple[list[str], int]:
        loop: Any = asyncio.get_running_loop()
        woken, wake = list[None](), loop._write_to_self
        loop._write_to_self = lambda: (woken.append(None), wake())
        post, done, ended = post_to(loop), list[str](), asyncio.Event()

        def post_both() -> None:
            post(lambda: done.append("first of the thread"))
            post(lambda: done.append("second of the thread"))
            post(ended.set)

        post(lambda: done.append("first of the loop"))
        post(lambda: done.append("second of the loop"))
        woken_by_own = len(woken)
        await asyncio.sleep(0)
        await asyncio.to_thread(post_both)
        await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        return done, woken_by_own

    done, woken_by_own = asyncio.run(scenario())
    assert done == [
        f"{n} of the {who}" for who in ("loop", "thread") for n in ("first", "second")
    ]
    assert woken_by_own == 0
