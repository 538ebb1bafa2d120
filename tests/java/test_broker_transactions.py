"""Transactions of MetaQ's own clients, and of a directory that changes hands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from metaq.client import Client
from metaq.fs import SystemFileSystem
from metaq.model import LogId, MessageId, Offset
from metaq.record.checksum import checksum
from metaq.record.layout import HEADER_BYTES, encode_record
from metaq.txn.opening import journal_numbers
from metaq.txn.records import (
    BatchLocation,
    RedoOperation,
    encode_locations,
    encode_operation,
)
from metaq.txn.sums import decode_sums
from tests.java.client import JavaClient
from tests.java.jvm import Jvm
from tests.java.server import JavaBroker, metaq
from tests.java.talk import Frame, Talk
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

TOPIC = "transactions"
NAME = TOPIC.encode()
COMMIT = 0x4000000
"""TMSUCCESS, and no flags."""
NO_FLAGS = 0

XID = b"XID:7:6f6e65:62:hands"
OTHER = b"XID:7:74776f:62:hands"
THIRD = b"XID:7:333333:62:hands"


class Xid:
    """A Java Xid."""

    def __init__(self, global_id: bytes) -> None:
        self._global_id = global_id

    def getFormatId(self) -> int:
        return 42

    def getGlobalTransactionId(self) -> bytes:
        return self._global_id

    def getBranchQualifier(self) -> bytes:
        return b"branch"

    class Java:
        implements = ("javax.transaction.xa.Xid",)


def data_of(ours: Client) -> list[bytes]:
    return [one.data for one in ours.browse(TOPIC)]


def test_a_local_transaction_of_java(java: JavaClient, ours: Client) -> None:
    """Nothing is read before the commit, all of it behind, nothing of a rollback."""
    before = len(data_of(ours))
    producer = java.producer(TOPIC)
    producer.beginTransaction()
    for data in (b"one", b"two"):
        assert java.send(producer, TOPIC, data).is_success
    assert len(data_of(ours)) == before
    producer.commit()
    assert data_of(ours)[before:] == [b"one", b"two"]
    producer.setTransactionTimeout(10)
    producer.beginTransaction()
    assert java.send(producer, TOPIC, b"never").is_success
    producer.rollback()
    assert data_of(ours)[before:] == [b"one", b"two"]
    assert java.send(producer, TOPIC, b"alone").is_success
    assert data_of(ours)[before:] == [b"one", b"two", b"alone"]


@pytest.fixture
def xa(jvm: Jvm, java_zookeeper: str, java_broker: BrokerProcess) -> Any:
    with JavaClient(jvm, java_zookeeper, factory="XAMetaMessageSessionFactory") as java:
        yield java


def test_xa_transactions_of_java(xa: JavaClient, ours: Client) -> None:
    """Prepare, recover, commit; prepare and rollback; one phase; nothing to prepare."""
    before = len(data_of(ours))
    producer = xa.factory.createXAProducer()
    producer.publish(TOPIC)

    def send(xid: Xid, *payloads: bytes) -> Any:
        resource = producer.getXAResource()
        resource.start(xid, NO_FLAGS)
        for data in payloads:
            assert xa.send(producer, TOPIC, data).is_success
        resource.end(xid, COMMIT)
        return resource

    first, second, third, fourth = (Xid(b"g%d" % each) for each in range(4))
    resource = send(first, b"xa-1", b"xa-2")
    assert resource.prepare(first) == 0
    assert [bytes(each.getGlobalTransactionId()) for each in resource.recover(0)] == [
        b"g0"
    ]
    assert len(data_of(ours)) == before
    resource.commit(first, False)
    assert data_of(ours)[before:] == [b"xa-1", b"xa-2"]
    resource = send(second, b"never")
    assert resource.prepare(second) == 0
    resource.rollback(second)
    resource = send(third, b"xa-3")
    resource.commit(third, True)
    assert data_of(ours)[before:] == [b"xa-1", b"xa-2", b"xa-3"]
    assert send(fourth).prepare(fourth) == 3
    with pytest.raises(Py4JJavaError, match="has not been started"):
        send(Xid(b"g9")).commit(fourth, False)


# -- a directory that changes hands ---------------------------------------------------


@pytest.fixture
def theirs(
    server_jars: list[Path], new_root: Callable[[], str], tmp_path: Path
) -> JavaBroker:
    """Return a broker that has not been started, its journal beside its data."""
    (tmp_path / "journal").mkdir()
    system = {"dataLogPath": tmp_path / "journal"}
    return JavaBroker(server_jars, tmp_path / "java", new_root(), {TOPIC: {}}, system)


def ours_on(theirs: JavaBroker, tmp_path: Path) -> BrokerProcess:
    arguments = ["--set=brokerId=0", f"--set=dataLogPath={tmp_path / 'journal'}"]
    return BrokerProcess(theirs.data, topic=TOPIC, arguments=arguments)


def ask(talk: Talk, text: bytes) -> bytes:
    found = talk.ask(text)
    assert isinstance(found, Frame), found
    assert found.head.startswith("result 200 "), found
    return found.body


def prepare(port: int, xid: bytes, data: bytes) -> MessageId:
    """Return the id of the one message."""
    with Talk(port) as talk:
        ask(talk, b"transaction %b s BEGIN 1\r\n" % xid)
        stored = ask(
            talk,
            b"put %b 0 %d 0 -1 %b 2\r\n%b" % (TOPIC.encode(), len(data), xid, data),
        )
        assert ask(talk, b"transaction %b s PREPARE 3\r\n" % xid) == b"0"
    return MessageId(int(stored.split()[0]))


def prepare_batch(port: int, xid: bytes, *payloads: bytes) -> None:
    records = b"".join(encode_record(data, id=MessageId(0)) for data in payloads)
    batch = b"mput %b 0 %d %d -1 - -1 %b 2\r\n%b" % (
        NAME, len(records), len(payloads), xid, records
    )  # fmt: skip
    with Talk(port) as talk:
        ask(talk, b"transaction %b s BEGIN 1\r\n" % xid)
        ask(talk, batch)
        assert ask(talk, b"transaction %b s PREPARE 3\r\n" % xid) == b"0"


def put(port: int, data: bytes) -> None:
    with Talk(port) as talk:
        ask(talk, b"put %b 0 %d 0 -1 1\r\n%b" % (NAME, len(data), data))


def recover(port: int) -> bytes:
    with Talk(port) as talk:
        return ask(talk, b"transaction null s RECOVER 1\r\n")


def commit(port: int, xid: bytes) -> None:
    with Talk(port) as talk:
        ask(talk, b"transaction %b s COMMIT_TWO_PHASE 1\r\n" % xid)


def all_of(port: int) -> list[bytes]:
    with Client(brokers=[f"127.0.0.1:{port}"]) as client:
        return [one.data for one in client.browse(TOPIC)]


def test_what_java_prepared_is_committed_here(
    theirs: JavaBroker, tmp_path: Path
) -> None:
    """Listed, committed once behind later puts, and readable once, there as well."""
    with theirs:
        put(theirs.port, b"first")
        prepare(theirs.port, XID, b"prepared")
        put(theirs.port, b"second")
    with ours_on(theirs, tmp_path) as broker:
        assert recover(broker.port) == XID
        put(broker.port, b"third")
        commit(broker.port, XID)
        prepare(broker.port, OTHER, b"other")
        wanted = [b"first", b"second", b"third", b"prepared"]
        assert all_of(broker.port) == wanted
    metaq("hand-over", str(theirs.data), "--yes")
    with theirs:
        assert recover(theirs.port) == OTHER
        assert all_of(theirs.port) == wanted


def commit_behind(port: int, key: bytes, data: bytes, others: list[bytes]) -> None:
    """Commit a message while others are put, which lie in front of it then."""
    with Talk(port) as talk:
        ask(talk, b"transaction %b s BEGIN 1\r\n" % key)
        ask(talk, b"put %b 0 %d 0 -1 %b 2\r\n%b" % (NAME, len(data), key, data))
        puts = [b"put %b 0 %d 0 -1 4\r\n%b" % (NAME, len(o), o) for o in others]
        verdict = b"transaction %b s COMMIT_ONE_PHASE 3\r\n" % key
        talk.send(verdict + b"".join(puts))
        for _ in range(1 + len(puts)):
            answer = talk.read()
            assert isinstance(answer, Frame), answer
            assert answer.head.startswith("result 200 "), answer


def add_commit(
    journal: Path, key: bytes, data: bytes, message_id: MessageId, offset: int
) -> None:
    """Write the record of a commit as a broker does that is killed just then.

    It has rewritten the offset; what was there first is the bound.
    """
    fs, directory = SystemFileSystem(), journal / "transactions"
    number = journal_numbers(fs, directory)[-1]
    batch = encode_record(data, id=message_id)
    place = BatchLocation(LogId(TOPIC, 0), Offset(offset), len(batch), checksum(batch))
    record = encode_operation(
        RedoOperation.XA_COMMIT,
        key.decode(),
        was_prepared=True,
        locations=[place._replace(offset=Offset(0))],
        has_bounds=True,
    )
    attachment = encode_locations([place])
    record = record[: -len(attachment)] + attachment
    file = fs.open_append(directory / f"redo.{number}", create=False)
    file.write(record)
    file.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("foreseen", ["at others", "across the end", "beyond it"])
def test_java_takes_over_from_a_broker_that_was_killed(
    theirs: JavaBroker, tmp_path: Path, foreseen: str
) -> None:
    """Prepared ones are listed; committed messages are there once, whether they had
    been appended behind other puts, or not yet, wherever they should have come to lie.
    """
    with theirs:
        put(theirs.port, b"first")
    journal = tmp_path / "journal"
    with ours_on(theirs, tmp_path) as broker:
        prepare(broker.port, XID, b"prepared")
        for key in (b"TX:s:1", b"TX:s:2"):
            commit_behind(broker.port, key, key, [b"beside " + key, b"too " + key])
        lost = prepare(broker.port, OTHER, b"not yet")
        prepare(broker.port, THIRD, b"also prepared")
        end = sum(HEADER_BYTES + len(data) for data in all_of(broker.port))
        broker.kill()
    sums = (journal / "transactions" / "sums.2").read_bytes()
    redo = (journal / "transactions" / "redo.2").read_bytes()
    bounds = decode_sums(sums, 2).bounds
    now = [int.from_bytes(redo[at : at + 8], "big") for at in bounds]
    assert all(place > bound for place, bound in zip(now, bounds.values(), strict=True))
    place = {"at others": 0, "across the end": end - 5, "beyond it": end + 1000}
    add_commit(journal, OTHER, b"not yet", lost, place[foreseen])
    metaq("hand-over", str(theirs.data), "--yes")
    with theirs:
        assert set(recover(theirs.port).split(b"\r\n")) == {XID, THIRD}
        found = all_of(theirs.port)
        wanted = [b"first", b"TX:s:1", b"TX:s:2", b"not yet"]
        wanted += [
            word + b" TX:s:%d" % n for word in (b"beside", b"too") for n in (1, 2)
        ]
        assert sorted(found) == sorted(wanted)
        commit(theirs.port, XID)
        assert recover(theirs.port) == THIRD
    metaq("hand-over", str(theirs.data), "--back")
    with ours_on(theirs, tmp_path) as broker:
        assert recover(broker.port) == THIRD
        assert sorted(all_of(broker.port)) == sorted([*wanted, b"prepared"])


def test_we_take_over_from_java_when_it_was_killed(
    theirs: JavaBroker, tmp_path: Path
) -> None:
    """The same the other way: nothing is lost, and nothing there twice."""
    wanted = [b"first", b"TX:s:1", b"TX:s:2", b"beside TX:s:1", b"beside TX:s:2"]
    wanted.append(b"committed")
    with theirs:
        put(theirs.port, b"first")
        prepare(theirs.port, XID, b"prepared")
        for key in (b"TX:s:1", b"TX:s:2"):
            commit_behind(theirs.port, key, key, [b"beside " + key])
        prepare(theirs.port, OTHER, b"committed")
        commit(theirs.port, OTHER)
        # MetaQ answers a commit before it appends.
        wait_until(lambda: len(all_of(theirs.port)) == len(wanted))
        with Talk(theirs.port) as talk:
            ask(talk, b"transaction TX:s:3 s BEGIN 1\r\n")
            ask(talk, b"put %b 0 4 0 -1 TX:s:3 2\r\nopen" % NAME)
            theirs.kill()
    with ours_on(theirs, tmp_path) as broker:
        assert recover(broker.port) == XID
        assert sorted(all_of(broker.port)) == sorted(wanted)
        commit(broker.port, XID)
        broker.kill()
        broker.start()
        assert recover(broker.port) == b""
        assert sorted(all_of(broker.port)) == sorted([*wanted, b"prepared"])


def test_what_we_prepared_is_committed_by_java(
    theirs: JavaBroker, tmp_path: Path
) -> None:
    """MetaQ lists it and commits it; here it is there once, and over."""
    with theirs:
        put(theirs.port, b"first")
    with ours_on(theirs, tmp_path) as broker:
        prepare(broker.port, XID, b"prepared")
        put(broker.port, b"second")
    metaq("hand-over", str(theirs.data), "--yes")
    with theirs:
        assert recover(theirs.port) == XID
        commit(theirs.port, XID)
        assert recover(theirs.port) == b""
        # MetaQ shows it after a restart only (docs/metaq-1.4/broker.md 5.7).
    metaq("hand-over", str(theirs.data), "--back")
    with ours_on(theirs, tmp_path) as broker:
        assert recover(broker.port) == b""
        assert sorted(all_of(broker.port)) == [b"first", b"prepared", b"second"]


def test_a_batch_that_we_prepared_is_committed_by_java(
    theirs: JavaBroker, tmp_path: Path
) -> None:
    """MetaQ reads each message of it as a put, in the same order."""
    with theirs:
        put(theirs.port, b"first")
    with ours_on(theirs, tmp_path) as broker:
        prepare_batch(broker.port, XID, b"one", b"two", bytes(300))
        prepare_batch(broker.port, OTHER, b"never")
    metaq("hand-over", str(theirs.data), "--yes")
    with theirs:
        assert set(recover(theirs.port).split(b"\r\n")) == {XID, OTHER}
        commit(theirs.port, XID)
        assert recover(theirs.port) == OTHER
    metaq("hand-over", str(theirs.data), "--back")
    with ours_on(theirs, tmp_path) as broker:
        assert recover(broker.port) == OTHER
        assert all_of(broker.port) == [b"first", b"one", b"two", bytes(300)]
