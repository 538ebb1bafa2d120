"""Every call reports an unreachable ZooKeeper by one error with its address."""

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metaq.client import Client
from metaq.errors import CoordinationError, NoBrokerError
from metaq.testing.zk import MemoryZooKeeper
from tests.client.worlds import WORLDS

ADDRESS = "127.0.0.1:1"
"""Nobody listens there."""
SHORT_S = 0.05


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with WORLDS[request.param](ADDRESS, request_timeout_s=SHORT_S) as one:
        yield one


def calls_of(client: Any) -> dict[str, Callable[[], object]]:
    """Return one call of each kind that has to ask of the cluster."""
    producer, xa = client.producer(timeout_s=SHORT_S), client.xa("q", timeout_s=SHORT_S)
    admin, transaction = client.admin(), producer.transaction()
    xa.begin(xa.xid(1, "x"))
    return {
        "prepare": lambda: producer.prepare("t"),
        "send": lambda: producer.send("t", b"x"),
        "send_many": lambda: producer.send_many("t", [b"x"]),
        "send_nowait": lambda: producer.send_nowait("t", b"x").result(30),
        "transaction": lambda: transaction.send("t", b"x"),
        "xa": lambda: xa.send("t", b"x"),
        "recover": lambda: client.xa("r", timeout_s=SHORT_S).recover(),
        "topics": client.topics,
        "partitions": lambda: client.partitions("t"),
        "stats": client.stats,
        "get": lambda: client.get("t", "0-0", 0),
        "browse": lambda: list(client.browse("t")),
        "browse in time": lambda: list(client.browse("t", timeout=SHORT_S)),
        "browse one": lambda: list(
            client.browse("t", partitions=["0-0"], timeout=SHORT_S)
        ),
        "follow": lambda: list(client.browse("t", stop_at_end=False, timeout=SHORT_S)),
        "start": lambda: client.consumer("g", ["t"]).start(),
        "start in time": lambda: client.consumer("g", ["t"]).start(timeout=SHORT_S),
        "lag": lambda: client.consumer("g", ["t"]).lag(),
        "create_topic": lambda: admin.create_topic("t", partitions=1),
        "alter_topic": lambda: admin.alter_topic("t", partitions=2),
        "delete_topic": lambda: admin.delete_topic("t"),
        "describe_topic": lambda: admin.describe_topic("t"),
        "admin topics": admin.topics,
        "brokers": admin.brokers,
        "forget_broker": lambda: admin.forget_broker(0),
    }


@pytest.mark.slow
def test_zookeeper_that_cannot_be_reached_is_that_in_every_call(client: Any) -> None:
    """One error and no chain, at the end of the time, of which it says how long."""
    wanted = re.compile(
        rf"cannot reach ZooKeeper at {re.escape(ADDRESS)} \(waited ([0-9.]+) s\)"
    )
    found = {}
    for name, call in calls_of(client).items():
        try:
            found[name] = f"is done: {call()}"
        except CoordinationError as error:
            text = str(error)
            is_one = "The above" not in "".join(traceback.format_exception(error))
            told = wanted.match(text)
            # Without options it were ten seconds.
            if told is None or not 0 < float(told[1]) < 5 or not is_one:
                found[name] = text
        except Exception as error:
            found[name] = repr(error)
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sync", "async"])
def test_zookeeper_that_goes_away_is_not_an_unknown_topic(world: str) -> None:
    """The client uses what it knew, and claims nothing of what it did not know."""
    server = MemoryZooKeeper()
    server.put("/meta/brokers/ids/0/master", b"meta://127.0.0.1:1")
    options: dict[str, Any] = {"request_timeout_s": SHORT_S}
    with WORLDS[world](coordinator=server.coordinator, **options) as client:
        assert client.topics(timeout=30) == ()
        server.stop()
        producer = client.producer(timeout_s=SHORT_S)
        admin = client.admin()
        for call in (
            lambda: producer.send("t", b"x"),
            client.topics,
            lambda: client.partitions("t"),
            lambda: list(client.browse("t", timeout=SHORT_S)),
            lambda: admin.describe_topic("t"),
            admin.brokers,
        ):
            with pytest.raises(CoordinationError, match=r"^cannot reach ZooKeeper \("):
                call()
        server.start()


def test_a_client_of_named_brokers_never_speaks_of_zookeeper() -> None:
    with (
        Client(brokers=[ADDRESS], request_timeout_s=SHORT_S) as client,
        pytest.raises(NoBrokerError, match=f"answers at meta://{ADDRESS}") as caught,
    ):
        client.topics()
    assert "ZooKeeper" not in str(caught.value)
