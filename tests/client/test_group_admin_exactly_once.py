"""Moving and deleting a group that writes exactly once loses no decision."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metaq.client import (
    CoordinationError,
    GroupInUseError,
    SettledGroup,
    TransactionInDoubtError,
)
from metaq.client.decisions.rules import make_decision
from metaq.errors import SessionSuspendedError
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.decisions import PREFIX, batch_xid
from metaq.zk.errors import PayloadError
from metaq.zk.paths import NodePaths
from metaq.zk.znodes import encode_address
from tests.client.worlds import WORLDS, payloads
from tests.sampling import SEED, quarter

PATHS = NodePaths()
PLACE = TopicPartition("in", BrokerId(0), 0)
DECIDED, LEFT, NEXT = ("0a" * 16, "0b" * 16, "0c" * 16)
TREES = ("/meta/exactly-once", "/meta/consumers")
ONE_BROKER = {
    "broker": "exactly once is not written to MetaQ 1.4",
    "client": "it is one of that broker",
}


class Server(MemoryZooKeeper):
    """Fails one request about groups, or is changed by others right after it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[tuple[str, str]] = []
        """Requests about groups, oldest first."""
        self.failing: tuple[int, bool] | None = None
        """Number of the request that fails, and whether it is carried out."""
        self.meanwhile: Callable[[str, str], None] = lambda _what, _path: None
        """Called before each request."""

    @contextmanager
    def serving(self, what: str, path: str, session_id: int) -> Iterator[None]:
        """Carry out a request, with its fault."""
        self.meanwhile(what, path)
        with super().serving(what, path, session_id):
            is_counted = path.startswith(TREES)
            at = len(self.passed)
            if is_counted:
                self.passed.append((what, path))
            if is_counted and self.failing == (at, False):
                raise SessionSuspendedError(f"{what} {path}: connection lost")
            yield
            if is_counted and self.failing == (at, True):
                raise SessionSuspendedError(f"{what} {path}: answer lost")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def broker(tmp_path: Path, server: Server) -> Iterator[EmbeddedBroker]:
    with embedded_broker(
        topics={"in": 1, "out": 1},
        data_path=tmp_path,
        zookeeper=server,
        settings={"brokerId": "0"},
    ) as one:
        yield one


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> Iterator[Any]:
    options = {**broker.client_options, "request_timeout_s": 5}
    with WORLDS[request.param](**options) as one:
        yield one


def prepare(client: Any, token: str, data: bytes, group: str = "g") -> Any:
    """Prepare a message as a member with this token does; return the id."""
    xid = batch_xid(group, f"{group}_member", token, 1)
    with client.xa(f"group-{group}") as xa:
        xa.begin(xid)
        xa.send("out", data)
        xa.prepare()
    return xid


def decide(server: Server, xid: Any) -> None:
    """Write a decision as a member does."""
    group = xid.qualifier.removeprefix(PREFIX)
    data = make_decision(xid, [BrokerId(0)]).encode()
    server.write(PATHS.group_decision(group, PLACE), data)


def left_by_the_dead(client: Any, server: Server, group: str = "g") -> None:
    """Have a group whose member died after a decision, and another one before."""
    server.put(PATHS.group_offset(group, PLACE), b"7-22")
    server.put(PATHS.owner(group, PLACE), b"")
    server.remove(PATHS.owner(group, PLACE))
    server.put(PATHS.members(group), b"")
    server.put(PATHS.group_tokens(group), b"")
    decide(server, prepare(client, DECIDED, b"decided %s" % group.encode(), group))
    prepare(client, LEFT, b"left", group)


def nodes_of(server: Server, group: str) -> list[str]:
    roots = [f"{tree}/{group}" for tree in TREES]
    return [path for path in server.tree() if path.startswith(tuple(roots))]


def prepared(client: Any, group: str = "g") -> list[Any]:
    with client.xa(f"group-{group}") as xa:
        return list(xa.recover())


def test_what_is_decided_is_committed_before_its_group_is_deleted(
    client: Any, server: Server
) -> None:
    """The rest is rolled back; no node of the group is left; a plan ends nothing."""
    left_by_the_dead(client, server)
    before = server.tree()
    planned = client.admin().delete_group("g", plan=True)
    assert (server.tree(), len(prepared(client))) == (before, 2)
    assert client.admin().delete_group("g") == planned
    assert nodes_of(server, "g") == []
    assert prepared(client) == []
    assert payloads(client.browse("out")) == [b"decided g"]


@pytest.mark.parametrize("is_carried_out", [False, True], ids=["failed", "lost"])
@pytest.mark.parametrize("client", ["sync"], indirect=True)
def test_zookeeper_may_fail_at_any_request_of_a_deletion(
    client: Any, server: Server, is_carried_out: bool
) -> None:
    """The same call again finishes it, and no decided message is missing."""
    left_by_the_dead(client, server, "count")
    del server.passed[:]
    client.admin().delete_group("count")
    count, decided = len(server.passed), [b"decided count"]
    assert count > 20
    for at in quarter(range(count), random.Random(SEED)):
        group = f"g{at}"
        left_by_the_dead(client, server, group)
        del server.passed[:]
        server.failing = (at, is_carried_out)
        with pytest.raises(CoordinationError):
            client.admin().delete_group(group)
        server.failing = None
        if group in client.admin().groups():
            client.admin().delete_group(group)
        assert nodes_of(server, group) == [], at
        assert prepared(client, group) == [], at
        decided.append(b"decided %s" % group.encode())
    assert payloads(client.browse("out")) == decided


def test_a_group_is_kept_while_a_member_may_decide(client: Any, server: Server) -> None:
    """It has left the group and its token is there: its decisions stay."""
    left_by_the_dead(client, server)
    server.put(PATHS.group_token("g", NEXT), b"g_late", session_id=99)
    with pytest.raises(GroupInUseError, match=r"exactly once is alive.*/tokens"):
        client.admin().delete_group("g")
    assert PATHS.group_decision("g", PLACE) in server.tree()
    assert PATHS.group_offset("g", PLACE) in server.tree()
    server.reap(99)
    client.admin().delete_group("g")
    assert nodes_of(server, "g") == []


def test_a_decision_of_a_member_that_came_in_between_is_kept(
    client: Any, server: Server
) -> None:
    """It was settled by nobody: it is the next call that may delete it."""
    left_by_the_dead(client, server)
    late = prepare(client, NEXT, b"late")
    server.put(PATHS.group_token("g", NEXT), b"g_late", session_id=99)
    tokens = PATHS.group_tokens("g")

    def meanwhile(what: str, path: str) -> None:
        if (what, path) == ("delete", tokens) and server.names(tokens):
            decide(server, late)
            server.reap(99)

    server.meanwhile = meanwhile
    with pytest.raises(GroupInUseError, match="exactly once is alive"):
        client.admin().delete_group("g")
    assert prepared(client) == [late]
    client.admin().delete_group("g")
    assert nodes_of(server, "g") == []
    assert payloads(client.browse("out")) == [b"decided g", b"late"]


def test_a_broker_that_is_away_keeps_the_group(client: Any, server: Server) -> None:
    """Its branches are not ended: nothing is deleted; nor if a node is damaged."""
    left_by_the_dead(client, server)
    away = PATHS.recorded_broker(BrokerId(7))
    server.put(away, encode_address(BrokerAddress("127.0.0.1", 1)))
    before = nodes_of(server, "g")
    with pytest.raises(TransactionInDoubtError, match="brokers 7 did not report"):
        client.admin().delete_group("g")
    assert nodes_of(server, "g") == before
    server.remove(away)
    server.write(PATHS.group_decision("g", PLACE), b"damaged")
    with pytest.raises(PayloadError, match=PATHS.group_decision("g", PLACE)):
        client.admin().delete_group("g")
    assert nodes_of(server, "g") == before


@pytest.mark.parametrize("move", ["delete_offsets", "reset_offsets"])
def test_a_decision_survives_its_offset(client: Any, server: Server, move: str) -> None:
    """It is committed by who claims the partition, or settles the group."""
    left_by_the_dead(client, server)
    more = {"to": "earliest"} if move == "reset_offsets" else {}
    getattr(client.admin(), move)("g", topics=["in"], **more)
    assert len(prepared(client)) == 2
    assert client.admin().settle_group("g") == SettledGroup(1, 1, {})
    assert payloads(client.browse("out")) == [b"decided g"]
    manual = {"commit_interval_s": None, "start": "earliest"}
    with client.producer() as producer:
        producer.send("in", b"1")
        with client.consumer("g", ["in"], **manual) as consumer:
            batches = consumer.batches(max_count=1, max_wait_s=0.2)
            with producer.exactly_once(next(batches)) as tx:
                tx.send("out", b"next")
            batches.close()
    assert payloads(client.browse("out")) == [b"decided g", b"next"]


def test_a_group_that_never_wrote_exactly_once_asks_no_broker(
    client: Any, server: Server
) -> None:
    """One request more than before, and brokers may be away."""
    server.put(PATHS.group_offset("g", PLACE), b"7-22")
    away = PATHS.recorded_broker(BrokerId(7))
    server.put(away, encode_address(BrokerAddress("127.0.0.1", 1)))
    del server.passed[:]
    client.admin().delete_group("g")
    asked = [path for _what, path in server.passed if path.startswith(TREES[0])]
    assert asked == [PATHS.group_decisions("g")]
    assert nodes_of(server, "g") == []
