"""Tasks that call a handler end at the first failure, or at the time-out."""

import asyncio
from typing import Any

import pytest

from metaq.client.consume.handler_tasks import HandlerTasks, failure_of
from metaq.errors import ConfigError

MESSAGE: Any = object()


def test_the_first_failure_ends_all_tasks() -> None:
    async def scenario() -> None:
        tasks, is_first, ended = HandlerTasks("group"), [True], list[str]()

        async def work() -> None:
            if is_first.pop() if is_first else False:
                raise ValueError("broken")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")

        with pytest.raises(ValueError, match="broken"):
            await tasks.run(work, 3, timeout_s=None, grace_s=30)
        assert ended == ["cancelled"] * 2

    asyncio.run(scenario())


def test_at_the_end_of_the_time_handlers_end_and_idle_tasks_are_cancelled() -> None:
    """The time of handlers is not used up by tasks without a message."""

    async def scenario() -> None:
        tasks, ended = HandlerTasks("group"), list[str]()
        kinds = ["idle", "busy"]

        async def work() -> None:
            if kinds.pop() == "idle":
                with tasks.idle():
                    await asyncio.sleep(60)
            await asyncio.sleep(0.05)
            ended.append("handled")

        await tasks.run(work, 2, timeout_s=0.0, grace_s=30)
        assert tasks.is_ending
        assert ended == ["handled"]

    asyncio.run(scenario())


def test_a_plain_function_is_refused_when_it_has_returned() -> None:
    """Its message is no failure: it would come again, and become a dead letter."""
    calls: list[object] = []
    handler: Any = calls.append
    with pytest.raises(ConfigError, match=r"an async function, got .* NoneType"):
        asyncio.run(failure_of(handler, MESSAGE))
    assert calls == [MESSAGE]


def test_a_cancelled_part_of_a_handler_is_its_failure() -> None:
    """The task itself was not cancelled."""

    async def handle(_message: object) -> None:
        raise asyncio.CancelledError

    async def scenario() -> None:
        error = await failure_of(handle, MESSAGE)
        assert isinstance(error, asyncio.CancelledError)

    asyncio.run(scenario())


def test_a_handler_that_is_cancelled_does_not_fail() -> None:
    """The cancellation is passed on."""

    async def scenario() -> None:
        task = asyncio.ensure_future(
            failure_of(lambda _message: asyncio.sleep(60), MESSAGE)
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
