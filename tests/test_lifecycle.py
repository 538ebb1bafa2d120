"""Services start in order, stop in reverse, and fail loudly, once, upwards."""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable

import pytest

from metaq.errors import ClosedError
from metaq.lifecycle import TRANSITIONS, Event, Service, State, apply

Hook = Callable[[Service], Awaitable[None]]


class Scripted(Service):
    """A service that does what the test says and writes down when."""

    def __init__(self, name: str, diary: list[str], start: Hook | None = None) -> None:
        super().__init__(name, stop_timeout_s=0.1)
        self.diary = diary
        self.script = start

    async def on_start(self) -> None:
        self.diary.append(f"{self.name} up")
        if self.script is not None:
            await self.script(self)

    async def on_stop(self) -> None:
        self.diary.append(f"{self.name} down")


async def forever() -> None:
    await asyncio.Event().wait()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def failing_with(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


# -- the table


def test_every_step_outside_the_table_is_refused_by_name() -> None:
    """The message names event and state; the table's steps lead where it says."""
    for state in State:
        for event in Event:
            if (state, event) in TRANSITIONS:
                assert apply(state, event) is TRANSITIONS[state, event]
                continue
            with pytest.raises(RuntimeError) as refusal:
                apply(state, event)
            assert event.value in str(refusal.value)
            assert state.value in str(refusal.value)


def test_ended_states_are_never_left() -> None:
    """Nothing leads from stopped or failed back to life."""
    for (state, _event), after in TRANSITIONS.items():
        if state in (State.STOPPED, State.FAILED):
            assert after is state


# -- order


def test_parts_stop_in_the_reverse_of_their_start() -> None:
    """Children, clean-ups and tasks go down one by one, the last one first."""
    diary: list[str] = []

    async def task() -> None:
        try:
            await forever()
        finally:
            diary.append("task down")

    async def note() -> None:
        diary.append("clean-up")

    async def start(service: Service) -> None:
        await service.start_owned(Scripted("a", diary))
        service.on_way_down("clean-up", note)
        service.spawn(task(), name="task")
        await service.start_owned(Scripted("b", diary))

    async def main() -> None:
        service = Scripted("top", diary, start)
        await service.start()
        assert service.state is State.RUNNING
        await turns()
        await asyncio.gather(service.stop(), service.stop())
        await service.stop()
        assert service.state is State.STOPPED

    asyncio.run(main())
    assert diary == [
        *("top up", "a up", "b up"),
        *("top down", "b down", "task down", "clean-up", "a down"),
    ]


def test_a_failed_start_takes_down_what_was_up() -> None:
    """The error is raised, the parts before it are stopped, on_stop is not called."""
    diary: list[str] = []
    error = ValueError("no port")

    async def start(service: Service) -> None:
        await service.start_owned(Scripted("a", diary))
        await service.start_owned(
            Scripted("b", diary, lambda _service: failing_with(error)())
        )

    async def main() -> None:
        service = Scripted("top", diary, start)
        with pytest.raises(ValueError, match="no port") as raised:
            await service.start()
        assert raised.value is error
        assert service.state is State.FAILED
        assert service.failure is error
        await service.stop()
        assert service.state is State.FAILED

    asyncio.run(main())
    assert diary == ["top up", "a up", "b up", "a down"]


def test_a_service_that_never_started_stops_at_once() -> None:
    """Stop before start is allowed; start after stop is not."""

    async def main() -> None:
        service = Scripted("top", [])
        await service.stop()
        assert service.state is State.STOPPED
        with pytest.raises(RuntimeError, match="start while it is stopped"):
            await service.start()

    asyncio.run(main())


def test_stop_ends_a_start_that_takes_long() -> None:
    """The starter is told so, and what it had brought up is down."""
    diary: list[str] = []

    async def start(service: Service) -> None:
        await service.start_owned(Scripted("a", diary))
        await forever()

    async def main() -> None:
        service = Scripted("top", diary, start)
        starting = asyncio.ensure_future(service.start())
        await turns()
        await service.stop()
        with pytest.raises(ClosedError, match="top"):
            await starting
        assert service.state is State.STOPPED

    asyncio.run(main())
    assert diary == ["top up", "a up", "a down"]


def test_a_cancelled_start_takes_everything_down() -> None:
    """A caller that gives up starting leaves nothing running."""
    diary: list[str] = []

    async def start(service: Service) -> None:
        await service.start_owned(Scripted("a", diary))
        await forever()

    async def main() -> None:
        service = Scripted("top", diary, start)
        starting = asyncio.ensure_future(service.start())
        await turns()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert service.state is State.STOPPED

    asyncio.run(main())
    assert diary == ["top up", "a up", "a down"]


# -- failure


def test_a_failed_task_fails_its_service_and_the_owner_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One log line with the traceback, one call at the top, and both have failed."""
    diary: list[str] = []
    error = ValueError("bad disk")
    calls: list[tuple[str, BaseException]] = []
    child = Scripted("child", diary)

    async def main() -> None:
        top = Service(
            "top",
            stop_timeout_s=1,
            on_failure=lambda service, why: calls.append((service.name, why)),
        )
        await top.start()
        await top.start_owned(child)
        child.spawn(failing_with(error)(), name="writer")
        child.spawn(failing_with(ValueError("second"))(), name="other")
        await turns()
        assert (top.state, child.state) == (State.FAILED, State.FAILED)
        await top.stop()
        assert (top.failure, child.failure) == (error, error)

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert calls == [("top", error)]
    assert diary == ["child up", "child down"]
    lines = [r for r in caplog.records if r.exc_info and r.exc_info[1] is error]
    assert len(lines) == 1
    assert "service=child part=child.writer" in lines[0].getMessage()


def test_a_task_that_fails_during_start_fails_the_start() -> None:
    """The start does not wait for ever for something a dead task should bring."""
    error = ValueError("no luck")

    async def start(service: Service) -> None:
        service.spawn(failing_with(error)(), name="task")
        await forever()

    async def main() -> None:
        service = Scripted("top", [], start)
        with pytest.raises(ValueError, match="no luck"):
            await service.start()
        assert service.state is State.FAILED

    asyncio.run(main())


def test_a_task_that_ends_is_forgotten() -> None:
    """Ended tasks neither fail the service nor stay in its books."""

    async def main() -> None:
        service = Scripted("top", [])
        await service.start()
        before = asyncio.all_tasks()
        for number in range(100):
            service.spawn(turns(1), name=f"task-{number}")
        tasks = weakref.WeakSet(asyncio.all_tasks() - before)
        assert len(tasks) == 100
        await turns()
        assert not tasks
        assert service.state is State.RUNNING
        await service.stop()

    asyncio.run(main())


def test_a_stopped_service_takes_no_task() -> None:
    """A task after stop would have no owner."""

    async def main() -> None:
        service = Scripted("top", [])
        await service.start()
        await service.stop()
        with pytest.raises(ClosedError):
            service.spawn(turns(1), name="late")

    asyncio.run(main())


# -- bounds


def test_stop_is_bounded_and_still_releases_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A part that hangs and one that raises are logged; the others are released."""
    diary: list[str] = []
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                diary.append("refused")

    async def start(service: Service) -> None:
        await service.start_owned(Scripted("a", diary))
        service.spawn(forever(), name="polite")
        service.on_way_down("broken", failing_with(ValueError("broken")))
        service.spawn(stubborn(), name="stubborn")

    async def main() -> None:
        service = Scripted("top", diary, start)
        await service.start()
        await turns()
        before = asyncio.get_running_loop().time()
        await service.stop()
        assert asyncio.get_running_loop().time() - before < 10
        assert service.state is State.FAILED
        assert str(service.failure).startswith("top.stubborn took longer than")
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "top.polite" not in names
        release.set()
        await turns()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert diary == ["top up", "a up", "top down", "refused", "a down"]
    text = caplog.text
    assert "stop took too long: service=top part=top.stubborn" in text
    assert "stop failed: service=top part=broken" in text
    assert "top.polite" not in text


def test_a_caller_that_gives_up_does_not_end_the_way_down() -> None:
    """Cancelling a stop leaves the service on its way to stopped."""
    diary: list[str] = []
    release = asyncio.Event()

    async def slow() -> None:
        await release.wait()
        diary.append("slow done")

    async def main() -> None:
        service = Scripted("top", diary)
        await service.start()
        service.on_way_down("slow", slow)
        stopping = asyncio.ensure_future(service.stop())
        await turns()
        stopping.cancel()
        await turns()
        assert service.state is State.STOPPING
        release.set()
        await service.stop()
        assert service.state is State.STOPPED

    asyncio.run(main())
    assert diary == ["top up", "top down", "slow done"]
