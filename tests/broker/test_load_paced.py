"""Paced work: jobs one after another, in turns, at a rate."""

from collections.abc import Callable
from typing import Any

from metaq.broker.load import PACED_BURST_S, PACED_JOBS_MAX, PacedWork, Turns


class Loop:
    """Time, and calls at a time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.later.append((delay_s, call))


class Rig:
    def __init__(self, bytes_per_s: int = 1000) -> None:
        self.loop: Any = Loop()
        self.soon: list[Callable[[], None]] = []
        self.work = PacedWork(self.loop, Turns(self.soon.append), bytes_per_s)
        self.steps: list[str] = []

    def job(self, name: str, count: int, size: int = 0) -> Callable[[], bool]:
        """Return a job of so many steps, each of which looks at some bytes."""
        left = [count]

        def step() -> bool:
            self.steps.append(name)
            self.work.spend(size)
            left[0] -= 1
            return left[0] > 0

        return step

    def turn(self) -> None:
        self.soon.pop(0)()


def test_a_job_that_is_alone_begins_at_once() -> None:
    """And goes on in later turns, before those that came after it."""
    rig = Rig()
    rig.work.add(rig.job("a", 3))
    assert rig.steps == ["a"]
    rig.work.add(rig.job("b", 1))
    for _ in range(3):
        rig.turn()
    assert rig.steps == ["a", "a", "a", "b"]
    assert rig.soon == []
    rig.work.add(rig.job("c", 1))
    assert rig.steps[-1] == "c"


def test_a_job_may_add_one() -> None:
    """From within its own step, also from its last."""
    rig = Rig()

    def first() -> bool:
        rig.work.add(rig.job("b", 1))
        return False

    rig.work.add(first)
    assert rig.steps == []
    rig.turn()
    assert rig.steps == ["b"]


def test_over_the_rate_a_step_comes_later() -> None:
    """A little ahead of it is nothing: timers are no finer."""
    size = 750
    rig = Rig(bytes_per_s=int(1000 / PACED_BURST_S))
    rig.work.add(rig.job("a", 3, size=size))
    assert rig.loop.later == []
    rig.turn()
    ((delay_s, go_on),) = rig.loop.later
    assert abs(delay_s - 1.5 * PACED_BURST_S) < 1e-9
    rig.work.add(rig.job("b", 1))
    assert rig.steps == ["a", "a"]
    rig.loop.now_s += delay_s
    go_on()
    assert rig.steps == ["a", "a", "a"]


def test_there_is_room_for_so_many() -> None:
    """For none where the rate is 0."""
    rig = Rig()
    rig.work.add(rig.job("a", 9))
    for _ in range(PACED_JOBS_MAX - 1):
        assert rig.work.has_room
        rig.work.add(rig.job("b", 1))
    assert not rig.work.has_room
    assert not Rig(bytes_per_s=0).work.has_room
