"""`metaq txn list` and `metaq txn settle` over a broker with branches of a group."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import click
import pytest

from metaq.cli.admin import ask
from metaq.cli.cluster import Target
from metaq.cli.transactions import list_transactions, settle
from metaq.client import Client, TransactionInDoubtError, XaTransactionId
from metaq.client.decisions.rules import make_decision
from metaq.model import BrokerAddress, BrokerId, TopicPartition
from metaq.protocol.transaction_ids import format_key
from metaq.testing.embedded import EmbeddedBroker, embedded_broker
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.decisions import batch_xid
from metaq.zk.paths import NodePaths
from metaq.zk.znodes import encode_address
from tests.client.worlds import payloads

PATHS = NodePaths()
PLACE = TopicPartition("in", BrokerId(0), 0)
DECIDED, LEFT, LIVING = ("0a" * 16, "0b" * 16, "0c" * 16)
PATIENCE_S = 60.0
ONE_BROKER = {"broker": "lists transactions, and takes those of exactly once"}
Broker: TypeAlias = "EmbeddedBroker"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with embedded_broker(
        topics={"in": 1, "out": 1},
        data_path=tmp_path,
        zookeeper=MemoryZooKeeper(),
        settings={"brokerId": "0"},
    ) as one:
        yield one


@pytest.fixture
def target(broker: Broker) -> Target:
    return Target("memory", "/meta", (), PATIENCE_S, broker.zookeeper.coordinator)


def prepare(broker: Broker, member: str, token: str) -> XaTransactionId:
    """Prepare a message as a member of the group does."""
    xid = batch_xid("copy", f"copy_{member}", token, 1)
    with Client(**broker.client_options) as client, client.xa("group-copy") as xa:
        xa.begin(xid)
        xa.send("out", member.encode())
        xa.prepare()
    return xid


def decide(broker: Broker, xid: XaTransactionId) -> None:
    """Write a decision as a member does."""
    data = make_decision(xid, [BrokerId(0)]).encode()
    broker.zookeeper.write(PATHS.group_decision("copy", PLACE), data)


def listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], list[str]]:
    """Return the keys that are listed, and the lines below them."""
    capsys.readouterr()
    list_transactions(tmp_path, as_json=False)
    _header, *lines = capsys.readouterr().out.splitlines()
    rows = [line.split("\t")[0] for line in lines if "\t" in line]
    return rows, [line for line in lines if "\t" not in line]


@pytest.mark.slow
def test_a_group_and_its_dead_members_are_named_and_settled(
    broker: Broker,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As was decided; the branch of a member that is alive stays, and is named."""
    decided = prepare(broker, "one", DECIDED)
    decide(broker, decided)
    left = prepare(broker, "two", LEFT)
    living = prepare(broker, "three", LIVING)
    broker.zookeeper.put(PATHS.group_token("copy", LIVING), b"copy_three")
    keys, lines = listed(tmp_path, capsys)
    assert {*keys} == {format_key(xid) for xid in (decided, left, living)}
    assert "\n".join(lines) == (
        "group-copy belongs to group copy, members copy_one, copy_two, copy_three,"
        " which writes exactly once; the next consumer of the group ends it, or:\n"
        "  metaq txn settle group-copy"
    )
    settle(target, "group-copy")
    assert capsys.readouterr().out == (
        "group copy: 1 branches of dead members were decided, and are committed; 1 were"
        " not, and are rolled back\n"
        "1 are of copy_three, which is alive and ends them\n"
    )
    assert listed(tmp_path, capsys)[0] == [format_key(living)]
    broker.zookeeper.remove(PATHS.group_token("copy", LIVING))
    settle(target, format_key(living))
    assert listed(tmp_path, capsys) == ([], [])
    with Client(**broker.client_options) as client:
        assert payloads(client.browse("out")) == [b"one"]


def test_settle_says_which_broker_is_away(broker: Broker, target: Target) -> None:
    """It may have a part of what was decided: nothing is reported as settled."""
    decide(broker, prepare(broker, "one", DECIDED))
    away = encode_address(BrokerAddress("127.0.0.1", 1))
    broker.zookeeper.put(PATHS.recorded_broker(BrokerId(7)), away)
    with pytest.raises(TransactionInDoubtError, match="brokers 7 did not report"):
        settle(target, "group-copy")


def test_a_branch_that_an_operator_has_ended_otherwise_is_named_by_its_key(
    broker: Broker, target: Target, tmp_path: Path
) -> None:
    """Nothing ends it but `metaq txn forget KEY`."""
    xid = prepare(broker, "one", DECIDED)
    decide(broker, xid)
    ask(tmp_path, "end_transaction", key=format_key(xid), **{"as": "rollback"})
    with pytest.raises(TransactionInDoubtError, match=format_key(xid)):
        settle(target, "group-copy")


@pytest.mark.parametrize("name", ["group-", "copy", "XID:1:0a:0b:billing-1"])
def test_a_name_of_no_write_is_refused(target: Target, name: str) -> None:
    with pytest.raises(click.BadParameter, match=r"expected sink-.* or group-"):
        settle(target, name)
