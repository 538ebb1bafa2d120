"""A session over servers that do what a test says; what real ones do is tested in
`tests/integration`.
"""

import asyncio
import logging
import struct
import threading
from collections.abc import Awaitable, Callable

import pytest

from metaq.clock import Clock, SystemClock
from metaq.errors import SessionSuspendedError
from metaq.testing.clock import ManualClock
from metaq.zk.coordinator import (
    REPORT_S,
    WATCH_READS_AT_ONCE,
    ZooKeeperCoordinator,
)
from metaq.zk.errors import CoordinationTimeoutError
from metaq.zk.session import SessionState
from tests.rigs.waiting import until
from tests.zk.scripted_server import (
    CLOSE,
    NO_NODE,
    NODE_EXISTS,
    PASSWORD,
    Greeted,
    Link,
    ScriptedServer,
    answer,
    greeting,
    scripted_server,
)

CLOCK = SystemClock()
SHORT_MS, LONG_MS = 600, 60_000
BEATS = 7
"""A sixth of the time-out apart."""
CONNECTIONS = 9


def in_s(seconds: float = 30.0) -> float:
    return CLOCK.monotonic_s() + seconds


def coordinator_on(
    *servers: ScriptedServer, clock: Clock = CLOCK
) -> ZooKeeperCoordinator:
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in servers)
    return ZooKeeperCoordinator(hosts, session_timeout_ms=LONG_MS, clock=clock)


def task_count() -> int:
    """Count the tasks of coordinators."""
    return sum(one.get_name().startswith("zookeeper") for one in asyncio.all_tasks())


async def connected(coordinator: ZooKeeperCoordinator, version: int = 1) -> None:
    """Wait until a session is connected, the one with this number."""
    await until(
        lambda: (
            coordinator.status.state is SessionState.CONNECTED
            and coordinator.status.session_version == version
        )
    )


async def grant(server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
    """Grant a session that does not end by itself."""
    await server.grant(link, LONG_MS, 0x51)


async def refuse(_server: ScriptedServer, _link: Link, _greeted: Greeted) -> None:
    """Close at once, as a server does that has not seen what its client has."""


async def garble(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
    link.send(b"?")


async def mute(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
    await link.reader.read()


Act = Callable[[ScriptedServer, Link, Greeted], Awaitable[None]]


def in_turn(*acts: Act) -> Act:
    """Do one thing after the other with the connections; the last one for the rest."""

    async def script(server: ScriptedServer, link: Link, greeted: Greeted) -> None:
        number = min(server.connection_count, len(acts))
        await acts[number - 1](server, link, greeted)

    return script


@pytest.mark.slow
@pytest.mark.parametrize("act", [refuse, garble])
def test_a_server_that_does_not_greet_is_asked_again(act: Act) -> None:
    """Also where its answer cannot be read; later and later, not in a busy loop."""

    async def scenario() -> None:
        async with scripted_server(in_turn(*[act] * 3, grant)) as server:
            coordinator = coordinator_on(server)
            begun_s = CLOCK.monotonic_s()
            coordinator.start()
            await connected(coordinator)
            # Pauses of at least half of 0.2, 0.4 and 0.8 s.
            assert CLOCK.monotonic_s() - begun_s > 0.6
            assert server.connection_count == 4
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.slow
def test_servers_that_do_not_reply_are_reported_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After each interval without a connection, with the reason."""

    def reports() -> list[str]:
        return [one for one in caplog.messages if one.startswith("no zookeeper server")]

    async def leave(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))

    async def scenario() -> None:
        clock = ManualClock()
        async with scripted_server(in_turn(leave, refuse)) as server:
            coordinator = coordinator_on(server, clock=clock)
            clock.advance_s(REPORT_S)
            coordinator.start()
            for expected in 0, 1, 2:
                tries = server.connection_count
                await until(lambda: server.connection_count > tries + 1)  # noqa: B023
                assert len(reports()) == expected
                clock.advance_s(REPORT_S)
            await coordinator.stop(deadline_s=clock.monotonic_s())
        last = f"last=127.0.0.1:{server.port} error=ConnectionError"
        assert all(last in each for each in reports())

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_server_that_does_not_reply_is_not_reported_while_another_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However late it is: only a round over all servers says that none replies."""

    async def scenario() -> None:
        clock = ManualClock()

        async def refuse_late(*_of: object) -> None:
            clock.advance_s(REPORT_S)

        async with scripted_server(refuse_late) as bad, scripted_server(grant) as good:
            for _ in range(8):  # whichever it begins with
                coordinator = coordinator_on(bad, good, clock=clock)
                coordinator.start()
                await connected(coordinator)
                await coordinator.stop(deadline_s=clock.monotonic_s() + 30)
            assert bad.connection_count

    asyncio.run(scenario())
    assert not [one for one in caplog.messages if "replies" in one]


@pytest.mark.slow
def test_a_mute_server_does_not_keep_the_others_from_being_asked() -> None:
    async def scenario() -> None:
        async with scripted_server(mute) as bad, scripted_server(grant) as good:
            hosts = f"127.0.0.1:{bad.port},127.0.0.1:{good.port}"
            for _ in range(3):  # whichever it begins with
                coordinator = ZooKeeperCoordinator(
                    hosts, session_timeout_ms=SHORT_MS, clock=CLOCK
                )
                coordinator.start()
                await connected(coordinator)
                await coordinator.stop(deadline_s=in_s())
            assert good.closed_sessions == [0x51] * 3

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_lost_connection_is_made_again_with_the_same_session() -> None:
    """Password and last transaction are those that its server gave."""

    async def once(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        beat = asyncio.create_task(link.serve(zxid=99))
        await released.wait()
        beat.cancel()

    async def scenario() -> None:
        async with scripted_server(in_turn(once, grant)) as server:
            coordinator = coordinator_on(server)
            states: list[str] = []
            coordinator.add_listener(lambda status: states.append(status.state.value))
            coordinator.start()
            await connected(coordinator)
            assert not await coordinator.exists("/a", deadline_s=in_s())
            released.set()
            await until(lambda: states == ["connected", "suspended", "connected"])
            assert coordinator.status.session_version == 1
            assert server.greeted == [
                Greeted(0, LONG_MS, 0, bytes(16)),
                Greeted(99, LONG_MS, 0x51, PASSWORD),
            ]
            await coordinator.stop(deadline_s=in_s())

    released = asyncio.Event()
    asyncio.run(scenario())


def test_requests_of_a_lost_connection_fail_when_it_is_known_as_lost() -> None:
    """A caller that hears of it and looks at the status finds it suspended."""

    async def once(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        await link.receive()

    async def scenario() -> None:
        async with scripted_server(in_turn(once, mute)) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            with pytest.raises(SessionSuspendedError):
                await coordinator.get("/a", deadline_s=in_s())
            assert coordinator.status.state is SessionState.SUSPENDED
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_change_without_an_answer_is_in_doubt_and_a_read_is_not() -> None:
    """A server that hangs executes what it has received when it goes on."""

    async def hear_three(
        _server: ScriptedServer, link: Link, _greeted: Greeted
    ) -> None:
        link.send(greeting(LONG_MS, 0x51))
        for _ in range(3):
            await link.receive()

    async def scenario() -> None:
        async with scripted_server(in_turn(hear_three, mute)) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            with pytest.raises(
                CoordinationTimeoutError,
                match=r"get /a: no answer from ZooKeeper in 0\.0?[0-9.]+ s$",
            ):
                await coordinator.get("/a", deadline_s=in_s(0.05))
            with pytest.raises(
                CoordinationTimeoutError,
                match=r" s; it may be carried out nevertheless$",
            ):
                await coordinator.delete("/a", deadline_s=in_s(0.05))
            with pytest.raises(
                SessionSuspendedError,
                match=r"replace /a: the connection to ZooKeeper was lost before the"
                r" answer; it may be carried out nevertheless$",
            ):
                await coordinator.replace("/a", b"", version=1, deadline_s=in_s())
            await coordinator.stop(deadline_s=in_s(0.1))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_that_is_over_is_followed_by_another() -> None:
    """Its server says so in the greeting. The next one sees nothing older."""

    async def once(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        await link.receive()
        link.send(answer(1, zxid=99, error=NO_NODE))

    async def over(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(0, 0, bytes(16)))
        await link.reader.read()
        left.set()

    left = asyncio.Event()

    async def scenario() -> None:
        async with scripted_server(in_turn(once, over, grant)) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            assert not await coordinator.exists("/a", deadline_s=in_s())
            await connected(coordinator, version=2)
            await asyncio.wait_for(left.wait(), 30.0)
            assert [one.session_id for one in server.greeted] == [0, 0x51, 0]
            assert [one.zxid for one in server.greeted] == [0, 99, 99]
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_silent_connection_is_left_while_the_session_lives() -> None:
    """Another server goes on with it: nothing of it is given up."""

    async def silent(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(3000, 0x51))
        await link.reader.read()

    async def scenario() -> None:
        async with scripted_server(in_turn(silent, grant)) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await until(lambda: len(server.greeted) == 2)
            await connected(coordinator)
            assert server.greeted[1].session_id == 0x51
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


def test_a_session_is_believed_in_from_when_its_greeting_was_sent() -> None:
    """A server may count from then on: others see its nodes go at the end of that."""

    async def scenario() -> None:
        clock, timeout_s = ManualClock(), SHORT_MS / 1000

        async def late(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
            clock.advance_s(timeout_s / 2)
            link.send(greeting(SHORT_MS, 0x51))
            await link.reader.read()

        async with scripted_server(in_turn(late, mute)) as server:
            coordinator = coordinator_on(server, clock=clock)
            coordinator.start()
            await connected(coordinator)
            clock.advance_s(timeout_s * 0.41)
            await until(lambda: coordinator.status.state is SessionState.LOST)
            await coordinator.stop(deadline_s=clock.monotonic_s() + 30)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_request_waits_for_the_answers_of_a_bounded_number_of_watches() -> None:
    """A broker of many topics reads thousands when it has connected."""

    async def scenario() -> None:
        paths = list[bytes]()

        async def note(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
            link.send(greeting(LONG_MS, 0x51))
            while True:
                body = await link.receive()
                (size,) = struct.unpack_from(">i", body, 8)
                paths.append(body[12 : 12 + size])

        async with scripted_server(note) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            for number in range(2 * WATCH_READS_AT_ONCE):
                coordinator.watch_data(f"/watched{number}", lambda _data: None)
            await until(lambda: len(paths) >= WATCH_READS_AT_ONCE)
            with pytest.raises(CoordinationTimeoutError):
                await coordinator.get("/other", deadline_s=in_s(0.2))
            await until(lambda: b"/other" in paths)
            assert paths.index(b"/other") == WATCH_READS_AT_ONCE
            await coordinator.stop(deadline_s=in_s(0.1))

    asyncio.run(scenario())


def test_a_parent_that_another_client_creates_first_is_a_parent() -> None:
    """Both found that there was none."""

    async def scenario() -> None:
        errors = iter([NO_NODE, NODE_EXISTS, 0])

        async def race(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
            link.send(greeting(LONG_MS, 0x51))
            for error in errors:
                (number,) = struct.unpack_from(">i", await link.receive())
                fields = b"" if error else struct.pack(">i", 4) + b"/a/b"
                link.send(answer(number, error=error, fields=fields))
            await link.serve()

        async with scripted_server(race) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            await coordinator.create_ephemeral("/a/b", b"", deadline_s=in_s())
            assert not [*errors]
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_that_asks_nothing_is_kept_alive() -> None:
    """Beat by beat, for longer than it lives after the last one."""

    async def count(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(3000, 0x51))
        for number in range(1, BEATS + 1):
            await link.receive()
            link.send(answer(number, zxid=7, error=NO_NODE))
            beats.append(number)
        await link.serve()

    async def scenario() -> None:
        async with scripted_server(count) as server:
            coordinator = coordinator_on(server)
            states: list[str] = []
            coordinator.add_listener(lambda status: states.append(status.state.value))
            coordinator.start()
            await until(lambda: len(beats) == BEATS)
            assert states == ["connected"]
            await coordinator.stop(deadline_s=in_s())
            assert server.connection_count == 1

    beats: list[int] = []
    asyncio.run(scenario())


@pytest.mark.slow
def test_each_connection_that_was_in_use_is_replaced_without_a_pause() -> None:
    """However often; only attempts in a row come later and later."""

    async def beat(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        if ends:
            gaps.append(CLOCK.monotonic_s() - ends[-1])
        link.send(greeting(60, 0x51))
        for number in (1, 2):
            await link.receive()
            link.send(answer(number, zxid=7, error=NO_NODE))
        await link.receive()
        ends.append(CLOCK.monotonic_s())

    async def scenario() -> None:
        async with scripted_server(beat) as server:
            # The session does not end, however short the time between two beats.
            coordinator = coordinator_on(server, clock=ManualClock())
            coordinator.start()
            await until(lambda: len(gaps) == CONNECTIONS)
            # The pauses of attempts in a row are of 2.5 s and more by then.
            assert min(gaps[-3:]) < 2.5
            await coordinator.stop(deadline_s=0.0)

    ends: list[float] = []
    gaps: list[float] = []
    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_that_is_given_up_is_ended_when_a_server_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its nodes would be in the way of the next one for a whole time-out. The next one
    claims to have seen nothing: the server may have lost its data.
    """

    async def script(server: ScriptedServer, link: Link, greeted: Greeted) -> None:
        if server.connection_count == 1:
            link.send(greeting(SHORT_MS, 0x51))
            await link.receive()
            link.send(answer(1, zxid=99, error=NO_NODE))
        elif "lost" in states:
            await server.grant(link, LONG_MS, greeted.session_id or 0x52)

    async def scenario() -> None:
        async with scripted_server(script) as server:
            coordinator = coordinator_on(server)
            coordinator.add_listener(lambda status: states.append(status.state.value))
            coordinator.start()
            await connected(coordinator)
            assert not await coordinator.exists("/a", deadline_s=in_s())
            await connected(coordinator, version=2)
            await until(lambda: server.closed_sessions == [0x51])
            await until(lambda: task_count() == 1)
            assert [one.zxid for one in server.greeted if not one.session_id] == [0, 0]
            assert "session abandoned" in caplog.text
            await coordinator.stop(deadline_s=in_s())
            assert server.closed_sessions == [0x51, 0x52]

    states: list[str] = []
    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_that_is_given_up_is_replaced_without_a_pause() -> None:
    """However long its server had refused it, as one does that has lost its data."""

    async def script(server: ScriptedServer, link: Link, greeted: Greeted) -> None:
        if server.connection_count == 1:
            link.send(greeting(60, 0x51))
        elif not greeted.session_id:
            await server.grant(link, LONG_MS, 0x52)

    async def scenario() -> None:
        async with scripted_server(script) as server:
            clock, times = ManualClock(), dict[SessionState, float]()
            coordinator = coordinator_on(server, clock=clock)
            coordinator.add_listener(
                lambda status: times.update({status.state: CLOCK.monotonic_s()})
            )
            coordinator.start()
            await until(lambda: server.connection_count == 5)
            clock.advance_s(1.0)
            await connected(coordinator, version=2)
            await asyncio.sleep(0)
            # The next attempt in a row is 1.6 s later, or more.
            assert times[SessionState.CONNECTED] - times[SessionState.LOST] < 1.6
            await coordinator.stop(deadline_s=clock.monotonic_s() + 30)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_session_that_cannot_be_ended_is_left_to_expire() -> None:
    """Servers are asked later and later, for no longer than it may live."""

    async def script(server: ScriptedServer, link: Link, greeted: Greeted) -> None:
        if server.connection_count == 1:
            link.send(greeting(SHORT_MS, 0x51))
        elif not greeted.session_id:
            await server.grant(link, LONG_MS, 0x52)

    async def scenario() -> None:
        async with scripted_server(script) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator, version=2)
            await until(lambda: task_count() == 1)
            assert 2 <= sum(one.session_id == 0x51 for one in server.greeted) < 20
            await coordinator.stop(deadline_s=in_s())

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_server_that_answers_nothing() -> None:
    """The caller has waited for it already; it is sent the end all the same."""
    asked: list[int] = []

    async def hear(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        while True:
            asked.append(int.from_bytes((await link.receive())[4:8], signed=True))

    async def scenario() -> None:
        async with scripted_server(hear) as server:
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            with pytest.raises(CoordinationTimeoutError):
                await coordinator.exists("/a", deadline_s=in_s(0.1))
            async with asyncio.timeout(30):
                await coordinator.stop(deadline_s=in_s(1000))
            await until(lambda: asked[-1:] == [CLOSE])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stop_ends_the_session_or_says_that_it_could_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits to its deadline, and not after it."""

    async def stop_on(act: Act) -> ScriptedServer:
        states: list[str] = []
        async with scripted_server(act) as server:
            coordinator = coordinator_on(server)
            coordinator.add_listener(lambda status: states.append(status.state.value))
            coordinator.start()
            await connected(coordinator)
            await coordinator.stop(deadline_s=in_s(0.1))
            await coordinator.stop(deadline_s=in_s())  # is harmless
            await until(lambda: states[-1:] == ["lost"])
        assert states == ["connected", "lost"]
        return server

    async def deaf(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        await link.reader.read()

    async def rude(_server: ScriptedServer, link: Link, _greeted: Greeted) -> None:
        link.send(greeting(LONG_MS, 0x51))
        await link.receive()

    caplog.set_level(logging.INFO)
    assert asyncio.run(stop_on(grant)).closed_sessions == [0x51]
    assert not caplog.messages
    for script in (deaf, rude):
        asyncio.run(stop_on(script))
        (text,) = caplog.messages
        assert text == "zookeeper session not closed in time, it will expire"
        caplog.clear()


def test_a_coordinator_has_no_thread_and_leaves_no_task() -> None:
    async def scenario() -> None:
        async with scripted_server(grant) as server:
            threads = threading.active_count()
            coordinator = coordinator_on(server)
            coordinator.start()
            await connected(coordinator)
            assert threading.active_count() == threads
            assert task_count() == 1
            await coordinator.stop(deadline_s=in_s())
            assert task_count() == 0

    asyncio.run(scenario())
