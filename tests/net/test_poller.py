"""Readiness of many sockets in one pass: who is called back, and when it ends."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from metaq.net.poller import Poller
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
