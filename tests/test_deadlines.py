"""Deadlines of many keys: a dictionary's answers, and a heap that does not grow."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from metaq.deadlines import SPARE_MAX, Deadlines, DeadlineTimer
from tests.rigs.virtual_time import VirtualClock, run_virtually

KEYS = st.sampled_from("abcd")
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("clear"), KEYS),
    st.tuples(st.just("take"), st.integers(0, 9)),
)


@given(steps=st.lists(STEPS, max_size=60))
def test_each_key_is_due_once_at_its_last_deadline(steps: list[tuple]) -> None:
    """Deadlines set again or cleared are not due; equal ones come as they were set."""
    deadlines = Deadlines[str]()
    model: dict[str, int] = {}
    for step in steps:
        if step[0] == "set":
            deadlines.set(step[1], step[2])
            model.pop(step[1], None)
            model[step[1]] = step[2]
        elif step[0] == "clear":
            deadlines.clear(step[1])
            model.pop(step[1], None)
        else:
            due = [key for key, due_s in model.items() if due_s <= step[1]]
            due.sort(key=model.__getitem__)
            assert deadlines.take_due(step[1]) == due
            for key in due:
                del model[key]
        assert len(deadlines) == len(model)
        assert {key: deadlines.get(key) for key in "abcd"} == {
            key: model.get(key) for key in "abcd"
        }


def test_what_is_cleared_is_not_kept_for_ever() -> None:
    """A far deadline that is cleared leaves the heap before its time."""

    class Key:
        count = 0

        def __init__(self) -> None:
            Key.count += 1

        def __del__(self) -> None:
            Key.count -= 1

    deadlines = Deadlines[Key]()
    for _ in range(5 * SPARE_MAX):
        key = Key()
        deadlines.set(key, 1e9)
        deadlines.clear(key)
    assert len(deadlines) == 0
    assert Key.count <= SPARE_MAX + 2


class Alarms:
    """A timer on a virtual loop, and when it called with which keys."""

    def __init__(self, together_s: float = 0.0) -> None:
        self.calls: list[tuple[float, list[str]]] = []
        self.deadlines = Deadlines[str]()
        self.start_s = self.now_s()
        self.timer = DeadlineTimer(
            self.deadlines, self.now_s, self.on_due, together_s=together_s
        )

    @staticmethod
    def now_s() -> float:
        return VirtualClock().monotonic_s()

    def on_due(self, due: list[str]) -> None:
        self.calls.append((round(self.now_s() - self.start_s, 6), due))

    def set(self, key: str, after_s: float) -> None:
        self.deadlines.set(key, self.start_s + after_s)
        self.timer.start()


def test_a_timer_ends_at_the_first_deadline_then_at_the_next() -> None:
    """An earlier one moves the timer; a later one does not hold it up."""

    async def scenario() -> list[tuple[float, list[str]]]:
        alarms = Alarms()
        alarms.set("b", 2)
        alarms.set("c", 3)
        alarms.set("a", 1)
        await asyncio.sleep(10)
        return alarms.calls

    assert run_virtually(scenario()) == [(1, ["a"]), (2, ["b"]), (3, ["c"])]


def test_what_ends_soon_ends_together_and_nothing_waits_longer() -> None:
    """A deadline that is set again and again does not put off the call."""

    async def scenario() -> list[tuple[float, list[str]]]:
        alarms = Alarms(together_s=0.5)
        alarms.set("a", 0.1)
        for number in range(4):
            await asyncio.sleep(0.1)
            alarms.set("b", 0.1 * number)
        await asyncio.sleep(10)
        return alarms.calls

    assert run_virtually(scenario()) == [(0.5, ["a", "b"])]


def test_a_timer_goes_on_after_a_call_that_failed() -> None:
    """The next deadline is kept, and the loop hears of the error."""

    async def scenario() -> tuple[list[str], list[str]]:
        alarms = Alarms()
        called: list[str] = []
        errors: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: errors.append(about["exception"]))

        def on_due(due: list[str]) -> None:
            called.extend(due)
            raise ValueError(due)

        timer = DeadlineTimer(alarms.deadlines, alarms.now_s, on_due)
        for number, key in enumerate("ab", start=1):
            alarms.deadlines.set(key, alarms.start_s + number)
        timer.start()
        await asyncio.sleep(10)
        return called, [str(error) for error in errors]

    assert run_virtually(scenario()) == (["a", "b"], ["['a']", "['b']"])


def test_a_closed_timer_calls_no_more() -> None:
    async def scenario() -> list[tuple[float, list[str]]]:
        alarms = Alarms()
        alarms.set("a", 1)
        alarms.timer.close()
        await asyncio.sleep(10)
        return alarms.calls

    assert run_virtually(scenario()) == []
