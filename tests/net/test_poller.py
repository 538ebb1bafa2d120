"""Readiness of many sockets in one pass: who is called back, and when it ends."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from metaq.net.poller import POLL_S, YIELD_S_MAX, Poller
from tests.rigs.waiting import until


class Rig:
    """Pairs of sockets whose near ends are watched; events are named by number."""

    def __init__(self, count: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.poller = Poller(self.loop)
        self.pairs = [socket.socketpair() for _ in range(count)]
        self.events: list[object] = []
        self.on_event: Callable[[int], object] = lambda _number: None
        self.watch()

    def watch(self) -> None:
        for number, (near, _) in enumerate(self.pairs):
            near.setblocking(False)
            self.poller.add_reader(near.fileno(), lambda n=number: self._read(n))

    def _read(self, number: int) -> None:
        self.events.append(number)
        with contextlib.suppress(BlockingIOError):
            self.pairs[number][0].recv(1)
        self.on_event(number)

    def send(self, data: bytes = b"x") -> None:
        for _, far in self.pairs:
            far.send(data)

    def close(self) -> None:
        self.poller.close()
        self.poller.close()
        for near, far in self.pairs:
            near.close()
            far.close()


def run(
    count: int,
    scenario: Callable[[Rig], Awaitable[None]],
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    async def main() -> None:
        rig = Rig(count)
        try:
            await scenario(rig)
        finally:
            rig.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def test_the_end_of_a_pass_comes_behind_all_that_were_readable() -> None:
    """It is asked for once by the first of them, and comes once."""

    async def scenario(rig: Rig) -> None:
        def ask(_number: int) -> None:
            if len(rig.events) == 1:
                rig.poller.call_at_end(lambda: rig.events.append("end"))

        rig.on_event = ask
        rig.send()
        await until(lambda: len(rig.events) >= 4)
        assert sorted(rig.events[:3]) == [0, 1, 2]
        assert rig.events[3:] == ["end"]

    run(3, scenario)


def test_outside_of_a_pass_the_end_is_the_next_turn() -> None:
    async def scenario(rig: Rig) -> None:
        rig.poller.call_at_end(lambda: rig.events.append("end"))
        assert not rig.events
        await until(lambda: len(rig.events) >= 1)
        assert rig.events == ["end"]

    run(1, scenario)


def test_what_is_left_in_a_socket_is_there_in_the_next_pass() -> None:
    async def scenario(rig: Rig) -> None:
        rig.send(b"xyz")
        await until(lambda: len(rig.events) >= 3)
        assert rig.events == [0, 0, 0]

    run(1, scenario)


def test_a_socket_that_another_removes_is_not_called_back() -> None:
    """Also where both were readable when the pass began."""

    async def scenario(rig: Rig) -> None:
        def remove(number: int) -> None:
            other = rig.pairs[1 - number][0].fileno()
            rig.poller.remove_reader(other)
            rig.poller.remove_reader(other)

        rig.on_event = remove
        rig.send()
        await until(lambda: len(rig.events) >= 1)
        await asyncio.sleep(0)
        assert len(rig.events) == 1

    run(2, scenario)


def test_a_reader_that_fails_costs_no_other_and_is_told() -> None:
    async def scenario(rig: Rig) -> None:
        told: list[object] = []
        rig.loop.set_exception_handler(lambda _, context: told.append(context))

        def fail(number: int) -> None:
            rig.poller.call_at_end(lambda: rig.events.append("end"))
            raise ValueError(number)

        rig.on_event = fail
        rig.send()
        await until(lambda: len(rig.events) >= 4)
        assert rig.events[2:] == ["end", "end"]
        assert [str(each["exception"]) for each in told] == ["0", "1"]

    run(2, scenario)


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on by a step at each look at it, where there is one."""

    step_s = ahead_s = now_s = 0.0
    looks = 0

    def time(self) -> float:
        self.looks += 1
        self.ahead_s += self.step_s
        if not self.step_s:
            self.now_s = super().time() + self.ahead_s
        else:
            self.now_s += self.step_s
        return self.now_s


def test_what_is_due_is_looked_for_in_the_same_turn() -> None:
    """Until it is there; what else the loop has to do comes behind it."""

    async def scenario(rig: Rig) -> None:
        rig.poller.close()
        rig.poller = Poller(rig.loop, is_due=lambda: len(rig.events) < 3)

        assert isinstance(rig.loop, SteppedLoop)
        rig.loop.step_s = POLL_S / 50

        def go_on(number: int) -> None:
            if not number:
                rig.loop.call_soon(rig.events.append, "turn")
            if number < 2:
                rig.pairs[number + 1][1].send(b"x")

        rig.on_event = go_on
        rig.watch()
        rig.pairs[0][1].send(b"x")
        await until(lambda: len(rig.events) >= 4)
        assert rig.events == [0, 1, 2, "turn"]

    run(3, scenario, SteppedLoop)


def count_looks(step_s: float, passes: int) -> list[int]:
    """Return how often passes looked at the clock that found nothing of what is due."""
    counts = []

    async def scenario(rig: Rig) -> None:
        loop = rig.loop
        assert isinstance(loop, SteppedLoop)
        poller = Poller(loop, is_due=lambda: True)

        def on_readable() -> None:
            near.recv(1)
            loop.looks, loop.step_s = 0, step_s
            loop.call_soon(on_end)

        def on_end() -> None:
            counts.append(loop.looks)
            loop.step_s = 0.0

        near, far = rig.pairs[0]
        rig.poller.remove_reader(near.fileno())
        poller.add_reader(near.fileno(), on_readable)
        while len(counts) < passes:
            far.send(b"x")
            before = len(counts)
            await until(lambda: len(counts) > before)  # noqa: B023
        poller.close()

    run(1, scenario, SteppedLoop)
    return counts


def test_what_does_not_come_is_waited_for_less_and_less_often() -> None:
    counts = count_looks(POLL_S / 50, 140)
    assert max(counts) > 40
    waited = [number for number, count in enumerate(counts) if count > 40]
    assert waited == [0, 2, 5, 10, 19, 36, 69, 134]


def test_a_processor_that_others_need_is_left_to_them() -> None:
    """The first look that comes late is the last one."""
    counts = count_looks(YIELD_S_MAX * 1.1, 3)
    assert max(counts) < 5 < POLL_S / YIELD_S_MAX * 2
