"""The parts of one client: time limits, addresses, and the order of closing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.cluster.context import ClientContext, ZooKeeperCall
from metaq.client.options import ClientOptions
from metaq.cluster_snapshot import BrokerCopies, ClusterSnapshot
from metaq.errors import ConfigError
from metaq.model import BrokerAddress, BrokerId
from metaq.testing.clock import ManualClock
from metaq.zk.paths import NodePaths

LEADER, FIRST, SECOND = (BrokerAddress("h", port) for port in (1, 2, 3))
B0 = BrokerId(0)


def context(
    copies: BrokerCopies | None = None, **parts: Any
) -> tuple[ClientContext, ManualClock]:
    clock = ManualClock()
    brokers = {} if copies is None else {B0: copies}
    more = {"pool": None, "make_producer": None, "paths": NodePaths()}
    more["draw_token"] = None
    metadata = SimpleNamespace(snapshot=ClusterSnapshot(1, brokers))
    parts = {"metadata": metadata, **more, **parts}
    options = ClientOptions(request_timeout_s=7.0, close_timeout_s=11.0)
    return ClientContext(clock=clock, options=options, **parts), clock


def test_a_call_without_a_timeout_has_that_of_the_client() -> None:
    """0 is a time: an answer that is there already."""
    parts, clock = context()
    assert [parts.limit_s(given) for given in (None, 2.5, 0)] == [7.0, 2.5, 0]
    assert parts.deadline_s() == clock.monotonic_s() + 7.0
    assert parts.deadline_s(2.5) == clock.monotonic_s() + 2.5


def test_a_timeout_that_is_no_time_is_refused() -> None:
    """Before anything is asked."""
    parts, _ = context()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ConfigError):
            parts.deadline_s(wrong)
    with pytest.raises(TypeError):
        parts.deadline_s("5")  # type: ignore[arg-type]  # as users do


@pytest.mark.parametrize(
    ("copies", "address"),
    [
        (None, None),
        (BrokerCopies(None, {}), None),
        (BrokerCopies(LEADER, {1: FIRST}), LEADER),
        (BrokerCopies(None, {1: FIRST, 2: SECOND}), FIRST),
    ],
)
def test_logs_are_read_from_the_leader_or_else_a_follower(
    copies: BrokerCopies | None, address: BrokerAddress | None
) -> None:
    """The follower of the smallest number; None where no copy is there."""
    parts, _ = context(copies)
    assert parts.address_of(B0) == address


def test_a_client_of_named_brokers_says_what_it_lacks_zookeeper_for() -> None:
    """A client that has ZooKeeper gets it."""
    parts, _ = context()
    with pytest.raises(ConfigError, match="groups are kept in ZooKeeper: expected"):
        parts.require_coordinator("groups are kept in")
    coordinator = object()
    parts, _ = context(coordinator=coordinator)
    assert parts.require_coordinator("groups are kept in") is coordinator


def test_each_question_of_a_call_ends_by_its_deadline() -> None:
    """They are bound once, and each has the deadline of the call."""

    class Answers:
        """Answers with the name of the question and its deadline."""

        def __getattr__(self, name: str) -> Any:
            async def ask(*_args: object, deadline_s: float) -> tuple[str, float]:
                return name, deadline_s

            return ask

    coordinator: Any = Answers()
    call: Any = ZooKeeperCall(coordinator, NodePaths(), 5.0)
    asked = {
        call.get: "get",
        call.exists: "exists",
        call.children: "children",
        call.write: "replace",
        call.put: "set_or_create",
        call.transact: "transact",
        call.delete: "delete",
    }
    for ask, name in asked.items():
        assert asyncio.run(ask()) == (name, 5.0)


class Ends:
    """Records the ends of the parts, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float | None]] = []

    def part(self, name: str) -> Any:
        async def end(deadline_s: float | None = None) -> None:
            self.seen.append((name, deadline_s))

        return SimpleNamespace(stop=end, close=end)


@pytest.mark.parametrize("given_s", [None, 5_000.0])
def test_the_session_ends_last_and_all_ends_have_one_deadline(
    given_s: float | None,
) -> None:
    """Closing needs connections, and connections need the metadata no more.

    Without a deadline it is `close_timeout_s` from now.
    """
    ends = Ends()
    parts = {name: ends.part(name) for name in ("metadata", "pool", "coordinator")}
    found, clock = context(**parts)
    asyncio.run(found.disconnect(given_s))
    deadline_s = clock.monotonic_s() + 11.0 if given_s is None else given_s
    assert ends.seen == [
        ("metadata", None),
        ("pool", deadline_s),
        ("coordinator", deadline_s),
    ]


@pytest.mark.parametrize("stuck", ["metadata", "pool"])
def test_a_cancelled_end_closes_the_rest_at_once(stuck: str) -> None:
    """A session that went on would keep the partitions of a group from all others."""
    ends = Ends()
    parts = {name: ends.part(name) for name in ("metadata", "pool", "coordinator")}
    waited = asyncio.Event()

    async def wait(deadline_s: float | None = None) -> None:
        if not waited.is_set():
            waited.set()
            await asyncio.Event().wait()
        ends.seen.append((stuck, deadline_s))

    parts[stuck].stop = parts[stuck].close = wait

    async def main() -> float:
        found, clock = context(**parts)
        ending = asyncio.ensure_future(found.disconnect(None))
        await waited.wait()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        return clock.monotonic_s()

    now_s = asyncio.run(main())
    assert ends.seen[-2:] == [("pool", now_s), ("coordinator", now_s)]


def test_a_client_of_named_brokers_has_no_session_to_end() -> None:
    """Metadata and connections are all."""
    ends = Ends()
    found, _ = context(metadata=ends.part("metadata"), pool=ends.part("pool"))
    asyncio.run(found.disconnect(1.0))
    assert [name for name, _ in ends.seen] == ["metadata", "pool"]
