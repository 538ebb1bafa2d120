"""The fake broker: MetaQ's behaviour on a socket, and every way to misbehave."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from metaq.protocol.commands import (
    Command,
    Get,
    OffsetQuery,
    Put,
    Result,
    Value,
    Version,
)
from metaq.protocol.version import decode_version_body
from metaq.record.flags import HAS_ATTRIBUTE
from metaq.testing.fake_broker import FakeBroker, FaultKind
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.znodes import decode_address
from tests.rigs.waiting import wait_until
from tests.testing.sockets import PATIENCE_S, Wire


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker({"test": 2}) as fake:
        yield fake


def put(opaque: int = 1, payload: bytes = b"hello", partition: int = 0) -> Put:
    return Put("test", partition, payload, 0, -1, opaque)


def get(opaque: int = 1, offset: int = 0, wait_ms: int = 0) -> Get:
    return Get("test", "g", 0, offset, 1 << 20, opaque, wait_ms)


def status_of(wire: Wire, command: Command) -> int:
    reply = wire.ask(command)
    return reply.status if isinstance(reply, Result) else 200


def test_what_is_put_can_be_read(broker: FakeBroker) -> None:
    """A put, its record, the get of it, and the end of the log."""
    with Wire(broker.address) as wire:
        assert status_of(wire, put()) == 200
        (record,) = broker.records()
        assert (record.payload, record.id < 0) == (b"hello", True)
        value = wire.ask(get(opaque=7))
        assert isinstance(value, Value)
        assert (len(value.payload), value.opaque) == (broker.log_end(), 7)
        # Looking at a partition does not make it.
        assert broker.payloads(partition=1) == []
        assert (broker.log_start(partition=1), broker.log_end(partition=1)) == (0, 0)
        missing = wire.ask(Get("test", "g", 1, 0, 100, 8))
        assert isinstance(missing, Result)
        assert "is not exists" in missing.text


def test_it_announces_and_keeps_no_extension(broker: FakeBroker) -> None:
    """No capability in the version; a wish to wait is not heard."""
    with Wire(broker.address) as wire:
        version = wire.ask(Version(1))
        assert isinstance(version, Result)
        capabilities = decode_version_body(version.text)
        assert not capabilities.has_mput
        assert capabilities.wait_ms_max == 0
        wire.send(put(2), get(3, offset=25, wait_ms=60_000))
        assert [wire.reply().opaque for _ in range(2)] == [2, 3]
    assert broker.statistics().empty_get_count == 1


@pytest.mark.parametrize(
    ("kind", "is_stored", "is_cut"),
    [
        (FaultKind.SWALLOW, False, False),
        (FaultKind.SWALLOW_STORED, True, False),
        (FaultKind.DROP, False, True),
        (FaultKind.DROP_STORED, True, True),
    ],
)
def test_faults_take_the_command_that_they_wait_for(
    broker: FakeBroker, kind: FaultKind, is_stored: bool, is_cut: bool
) -> None:
    """The second put meets it; others and the next one do not."""
    broker.inject(kind, after=1)
    with Wire(broker.address) as wire:
        assert status_of(wire, put(1, b"1")) == 200
        wire.send(put(2, b"2"))
        if is_cut:
            assert wire.is_ended()
        else:
            assert wire.ask(Version(3)).opaque == 3
    with Wire(broker.address) as wire:
        assert status_of(wire, put(4, b"4")) == 200
    assert broker.payloads() == ([b"1", b"2", b"4"] if is_stored else [b"1", b"4"])
    assert broker.statistics().fault_count == 1


def test_refusals_have_a_status_and_a_count(broker: FakeBroker) -> None:
    """As many commands as asked for, of the verb that was asked for."""
    broker.inject(FaultKind.REFUSE, verb="get", status=503, body=b"busy", count=2)
    with Wire(broker.address) as wire:
        assert status_of(wire, put(1)) == 200
        assert wire.ask(get(2)) == Result(503, b"busy", 2)
        assert wire.ask(get(3)) == Result(503, b"busy", 3)
        assert isinstance(wire.ask(get(4)), Value)


def test_faults_of_any_verb_and_several_at_once(broker: FakeBroker) -> None:
    """The one that was injected first goes first."""
    broker.inject(FaultKind.REFUSE, verb="", status=500)
    broker.inject(FaultKind.REFUSE, verb="put", status=503)
    with Wire(broker.address) as wire:
        commands = [put(1), put(2), put(3)]
        assert [status_of(wire, c) for c in commands] == [500, 503, 200]


def test_drop_connections_cuts_those_that_are_open(broker: FakeBroker) -> None:
    """New ones are taken."""
    with Wire(broker.address) as wire:
        assert wire.ask(Version(1)).opaque == 1
        broker.drop_connections()
        assert wire.is_ended()
    with Wire(broker.address) as wire:
        assert wire.ask(Version(1)).opaque == 1
    assert broker.statistics().connection_count == 2
    wait_until(lambda: broker.statistics().open_connection_count == 0)


def test_content_can_be_arranged(broker: FakeBroker) -> None:
    """Attributes, chosen ids, segments, damage and closed partitions."""
    first = broker.add(b"data", attribute="k=v", message_id=5)
    broker.roll()
    second = broker.add(b"more")
    records = broker.records()
    assert (records[0].id, records[0].flag) == (5, HAS_ATTRIBUTE)
    broker.corrupt(second)
    assert broker.payloads()[1] == b"lore"
    broker.trim()
    assert (first, broker.log_start()) == (0, second)
    with Wire(broker.address) as wire:
        assert wire.ask(get(1)) == Result(301, b"%d" % second, 1)
        far = Get("test", "g", 0, 9999, 100, 2)
        assert status_of(wire, far) == 404
        broker.metaq.does_redirect = True
        assert status_of(wire, far) == 301
        broker.metaq.transfer_bytes_max = 3
        value = wire.ask(get(3, offset=second))
        assert isinstance(value, Value)
        assert len(value.payload) == broker.metaq.transfer_bytes_max == 3
        broker.close_partition()
        assert [status_of(wire, c) for c in (put(4), get(5))] == [403, 403]
        assert status_of(wire, OffsetQuery("test", "g", 0, 0, 6)) == 200
        broker.open_partition()
        assert status_of(wire, put(7)) == 200


def test_it_goes_away_and_comes_back(broker: FakeBroker) -> None:
    """On its old port, or on another one; messages survive."""
    broker.add(b"kept")
    old = broker.port
    with Wire(broker.address) as wire:
        broker.go_away()
        assert wire.is_ended()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((broker.address.host, old))
    broker.come_back()
    assert broker.port == old
    broker.go_away()
    broker.come_back(port=0)
    with Wire(broker.address) as wire:
        assert isinstance(wire.ask(get()), Value)


def test_it_registers_as_metaq_does() -> None:
    """MetaQ's nodes; gone with the broker unless it just died; a new address counts."""
    zookeeper = MemoryZooKeeper()
    with FakeBroker(
        {"test": 2}, broker_id=3, coordinator=zookeeper.coordinator
    ) as fake:
        nodes = {path: node.data for path, node in zookeeper.tree().items()}
        assert nodes["/meta/brokers/ids/3/master"] == str(fake.address).encode()
        assert nodes["/meta/brokers/topics/test/3-m"] == b"2"
        both = b'{"numParts":2,"broker":"3-m"}'
        assert nodes["/meta/brokers/topics-pub/test/3-m"] == both
        assert nodes["/meta/brokers/topics-sub/test/3-m"] == both
        fake.create_topic("more", 4)
        wait_until(lambda: "/meta/brokers/topics-pub/more/3-m" in zookeeper.tree())
        fake.go_away(keeps_nodes=True)
        assert "/meta/brokers/ids/3/master" in zookeeper.tree()
        fake.come_back(port=0)
        master = zookeeper.tree()["/meta/brokers/ids/3/master"]
        assert decode_address(master.data) == fake.address
        fake.go_away()
        assert "/meta/brokers/ids/3/master" not in zookeeper.tree()
        fake.come_back()
        assert "/meta/brokers/topics-sub/more/3-m" in zookeeper.tree()
    assert "/meta/brokers/ids/3/master" not in zookeeper.tree()
    assert zookeeper.coordinators == ()


def test_tests_with_an_event_loop_can_use_it(broker: FakeBroker) -> None:
    """It does not need the loop of the test."""

    async def scenario() -> bytes:
        reader, writer = await asyncio.open_connection(broker.address.host, broker.port)
        writer.write(b"version 1\r\n")
        line = await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
        return line

    assert asyncio.run(scenario()) == b"result 200 7 1\r\n"


def test_stop_may_be_repeated_and_a_taken_port_is_an_error() -> None:
    """A start that fails leaves no thread behind, and nothing to stop."""
    fake, other = FakeBroker(), FakeBroker()
    fake.stop()
    with fake:
        other.port = fake.port
        with pytest.raises(OSError, match="in use"):
            other.start()
        other.stop()
    fake.stop()
