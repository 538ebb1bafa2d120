"""Transactions left by dead members of a group are ended by hand, as decided."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from metaq.client import SettledGroup, TransactionInDoubtError
from metaq.client.decisions.rules import make_decision
from metaq.model import BrokerAddress, BrokerId, TopicPartition, XaTransactionId
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.decisions import batch_xid
from metaq.zk.paths import BrokerRole, NodePaths
from metaq.zk.znodes import encode_address
from tests.client.worlds import WORLDS, payloads

PATHS = NodePaths()
PLACE = TopicPartition("in", BrokerId(0), 0)
DECIDED, LEFT, LIVING = ("0a" * 16, "0b" * 16, "0c" * 16)
ONE_BROKER = {"started": "exactly once is not written to MetaQ 1.4"}
Started: TypeAlias = "tuple[EmbeddedBroker, ExitStack]"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Return a broker, and what stops it."""
    with ExitStack() as stack:
        broker = stack.enter_context(
            embedded_broker(
                topics={"in": 1, "out": 1},
                data_path=tmp_path,
                zookeeper=MemoryZooKeeper(),
                settings={"brokerId": "0"},
            )
        )
        yield broker, stack


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, started: Started) -> Iterator[Any]:
    options = {**started[0].client_options, "request_timeout_s": 5}
    with WORLDS[request.param](**options) as one:
        yield one


def prepare(client: Any, token: str, data: bytes) -> XaTransactionId:
    """Prepare a message as a member with this token does."""
    xid: XaTransactionId = batch_xid("g", "g_member", token, 1)
    with client.xa("group-g") as xa:
        xa.begin(xid)
        xa.send("out", data)
        xa.prepare()
    return xid


def test_decided_is_committed_and_the_rest_rolled_back(
    started: Started, client: Any
) -> None:
    """A member that is alive keeps what it has, and is named."""
    server = started[0].zookeeper
    decision = make_decision(prepare(client, DECIDED, b"decided"), [BrokerId(0)])
    server.write(PATHS.group_decision("g", PLACE), decision.encode())
    prepare(client, LEFT, b"left")
    living = prepare(client, LIVING, b"living")
    server.write(PATHS.group_token("g", LIVING), b"g_living")
    settled = client.admin().settle_group("g")
    assert settled == SettledGroup(1, 1, {"g_living": 1})
    assert payloads(client.browse("out")) == [b"decided"]
    with client.xa("group-g") as xa:
        assert xa.recover() == [living]
    assert client.admin().settle_group("g") == SettledGroup(0, 0, {"g_living": 1})


@pytest.mark.slow
@pytest.mark.parametrize("has_follower", [False, True])
def test_a_broker_that_is_away_is_no_broker_without_branches(
    started: Started, client: Any, has_follower: bool
) -> None:
    """It may have some, also while a follower serves its gets: nothing is settled."""
    prepare(client, LEFT, b"left")
    started[1].close()
    if has_follower:
        follower = PATHS.role(BrokerRole(BrokerId(0), 1))
        address = encode_address(BrokerAddress("127.0.0.1", 1))
        started[0].zookeeper.put(follower, address, session_id=99)
    options = {**started[0].client_options, "request_timeout_s": 5}
    with (
        type(client)(**options) as late,
        pytest.raises(
            TransactionInDoubtError, match="did not report their transactions"
        ),
    ):
        late.admin().settle_group("g")
