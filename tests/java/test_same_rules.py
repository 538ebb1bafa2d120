"""Rules that both sides must have in common, each asked of MetaQ's own Java classes."""

import string
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from py4j.protocol import Py4JJavaError

from metaq.assignment import Strategy, assign, string_order
from metaq.client import ClientOptions, ConsumerOptions
from metaq.client.consume.redelivery import RetryPolicy
from metaq.client.names import check_group
from metaq.client.produce.ordered_producer import parse_layout
from metaq.errors import ConfigError
from metaq.model import (
    LocalTransactionId,
    MessageId,
    NullTransactionId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.commands import (
    Command,
    Get,
    OffsetQuery,
    Put,
    Result,
    Stats,
    Sync,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.encoding import encode
from metaq.record.flags import encode_payload
from metaq.record.layout import encode_record
from tests.java.client import JavaClient
from tests.java.jvm import Jvm
from tests.rigs.strategies import COUNTS, I32, I64, PAYLOADS, transaction_ids

NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1)
"""Tokens: of others Java cannot write each command, for it reckons with their length in
characters."""
MEMBERS = st.sets(st.text("abgxyz_-0189", min_size=1, max_size=5), min_size=1)
PLACES = st.sets(
    st.builds("{}-{}".format, st.integers(0, 12), st.integers(0, 12)), max_size=30
)
STRATEGIES = {
    Strategy.DEFAULT: "DefaultLoadBalanceStrategy",
    Strategy.CONSIST: "ConsisHashStrategy",
}


@given(st.sampled_from(Strategy), MEMBERS, PLACES)
def test_strategies_share_alike(
    jvm: Jvm, strategy: Strategy, members: set[str], places: set[str]
) -> None:
    """The same plan in both implementations."""
    java = getattr(jvm.metaq.client.consumer, STRATEGIES[strategy])()
    plan = assign(strategy, members, places)
    lists = string_order(members), string_order(places)
    for member in members:
        share = java.getPartitions("topic", member, *lists)
        assert set(share) == set(plan[member]), member


@given(st.sets(st.text(max_size=3)))
def test_texts_are_sorted_alike(jvm: Jvm, texts: set[str]) -> None:
    """Names beyond the basic plane too: Java compares halves of them."""
    java = jvm.package("java.util").TreeSet()
    java.addAll(list(texts))
    assert string_order(texts) == list(java)


def is_legal_in_java(java: JavaClient, group: str) -> bool:
    config = java.jvm.metaq.client.consumer.ConsumerConfig(group)
    try:
        java.factory.createConsumer(config).shutdown()
    except Py4JJavaError as error:
        if "InvalidConsumerConfigException" not in str(error.java_exception):
            raise
        return False
    return True


def is_legal(group: str) -> bool:
    try:
        return check_group(group) == group
    except ConfigError:
        return False


def test_groups_are_named_alike(java: JavaClient) -> None:
    """Each sign within a name is refused by both or by none."""
    names = [f"a{sign}b" for sign in string.punctuation + " a0\u00e9"]
    verdicts = {name: is_legal(name) for name in names}
    assert verdicts == {name: is_legal_in_java(java, name) for name in names}


def test_defaults_are_alike(jvm: Jvm) -> None:
    """Users who move find the same times and numbers."""
    java = jvm.metaq.client.consumer.ConsumerConfig("group")
    client, consumer, policy = ClientOptions(), ConsumerOptions(), RetryPolicy()
    assert client.request_timeout_s * 1000 == java.getFetchTimeoutInMills()
    assert consumer.commit_interval_s * 1000 == java.getCommitOffsetPeriodInMills()
    assert consumer.idle_max_s * 1000 == java.getMaxDelayFetchTimeInMills()
    assert consumer.strategy == java.getLoadBalanceStrategyType().toString()
    assert policy.attempts_max == java.getMaxFetchRetries() + 1
    assert policy.replay_interval_s * 1000 == java.getRecoverMessageIntervalInMills()
    zookeeper = jvm.metaq.utils.ZkUtils.ZKConfig()
    assert client.session_timeout_s * 1000 == zookeeper.getZkSessionTimeoutMs()
    assert client.root == zookeeper.getZkRoot()


def java_id(jvm: Jvm, transaction: TransactionId | None) -> Any:
    """Return Java's twin of a transaction's id."""
    package = jvm.metaq.transaction
    match transaction:
        case LocalTransactionId():
            return package.LocalTransactionId(
                transaction.session_id, transaction.number
            )
        case XaTransactionId():
            return package.XATransactionId(
                transaction.format_id,
                transaction.branch,
                transaction.global_id,
                transaction.qualifier,
            )
        case NullTransactionId():
            return package.TransactionId.Null
    return None


def java_twin(jvm: Jvm, event: Command | Result) -> Any:
    """Return Java's twin of a command or a result."""
    wire = jvm.metaq.network
    match event:
        case Put(topic, partition, payload, flag, checksum, opaque, transaction):
            id_ = java_id(jvm, transaction)
            return wire.PutCommand(
                topic, partition, payload, flag, checksum, id_, opaque
            )
        case Get(topic, group, partition, offset, max_size, opaque):
            return wire.GetCommand(topic, group, partition, offset, max_size, opaque)
        case OffsetQuery(topic, group, partition, offset, opaque):
            return wire.OffsetCommand(topic, group, partition, offset, opaque)
        case Version(opaque):
            return wire.VersionCommand(opaque)
        case Stats(item, opaque):
            return wire.StatsCommand(opaque, item or None)
        case Sync(topic, partition, payload, flag, id_, checksum, opaque):
            return wire.SyncCommand(
                topic, partition, payload, flag, id_, checksum, opaque
            )
        case TransactionCommand():
            types = jvm.metaq.transaction.TransactionInfo.TransactionType
            info = jvm.metaq.transaction.TransactionInfo(
                java_id(jvm, event.transaction),
                event.session_id,
                types.valueOf(event.type.value),
                event.qualifier,
                event.timeout_s,
            )
            return wire.TransactionCommand(info, event.opaque)
        case Result(status, body, opaque):
            return wire.BooleanCommand(status, body.decode() or None, opaque)
    raise AssertionError(event)


def bytes_of(buffer: Any) -> bytes:
    return bytes(buffer.array())[buffer.position() : buffer.limit()]


NUMBERS = I64.filter(lambda number: number > -(2**63))
"""Java has no room for the digits of the one below."""
IDS = transaction_ids().filter(lambda one: str(one).isascii())
COMMANDS = st.one_of(
    st.builds(Put, NAMES, I32, PAYLOADS, I32, I32, I32, st.none() | IDS),
    st.builds(Get, NAMES, NAMES, I32, NUMBERS, I32, I32),
    st.builds(OffsetQuery, NAMES, NAMES, I32, NUMBERS, I32),
    st.builds(Version, I32),
    st.builds(Stats, NAMES | st.just(""), I32),
    st.builds(Sync, NAMES, I32, PAYLOADS, I32, NUMBERS, I32, I32),
    st.builds(
        TransactionCommand,
        IDS,
        NAMES,
        st.sampled_from(TransactionType),
        I32,
        COUNTS,
        st.none() | NAMES.filter(lambda text: not text.isdigit()),
    ),
)
RESULTS = st.builds(Result, I32, st.text(max_size=50).map(str.encode), I32)


def read_by_java(jvm: Jvm, frame: bytes) -> Any:
    """Return what Java's codec makes of exactly these bytes."""
    codec = jvm.metaq.network.MetamorphosisWireFormatType().newCodecFactory()
    buffer = jvm.package("com.taobao.gecko.core.buffer").IoBuffer.wrap(frame)
    found = codec.getDecoder().decode(buffer, None)
    assert buffer.remaining() == 0
    return found


@given(COMMANDS | RESULTS)
def test_frames_are_alike(jvm: Jvm, event: Command | Result) -> None:
    """Java writes the bytes that we write, and reads from them what it meant."""
    ours = encode(event)
    assert ours == bytes_of(java_twin(jvm, event).encode())
    assert ours == bytes_of(read_by_java(jvm, ours).encode())


@given(st.builds(Value, PAYLOADS, I32))
def test_answers_to_gets_are_read(jvm: Jvm, value: Value) -> None:
    """Java's broker has no other way to write them than by sending a file."""
    read = read_by_java(jvm, encode(value))
    assert (bytes(read.getData()), read.getOpaque()) == (value.payload, value.opaque)


@given(PAYLOADS, I64, I32)
def test_records_are_alike(jvm: Jvm, payload: bytes, number: int, flag: int) -> None:
    """Java stores the bytes that we store."""
    put = jvm.metaq.network.PutCommand("topic", 0, payload, flag, -1, None, 0)
    record = jvm.metaq.utils.MessageUtils.makeMessageBuffer(number, put)
    assert bytes(record.array()) == encode_record(
        payload, id=MessageId(number), flag=flag
    )


@given(st.binary(max_size=50), st.none() | st.text(max_size=20))
def test_messages_are_read_alike(jvm: Jvm, data: bytes, attribute: str | None) -> None:
    """Data and attribute out of a record of ours."""
    payload, flag = encode_payload(data, attribute)
    record = encode_record(payload, id=MessageId(7), flag=flag)
    found = jvm.metaq.consumer.MessageIterator("topic", record).next()
    assert (bytes(found.getData()), found.getAttribute()) == (data, attribute)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1))
def test_layouts_are_read_alike(jvm: Jvm, counts: list[tuple[int, int]]) -> None:
    """`partitionsInfo` of ordered producers; Java repeats a broker that is repeated."""
    text = ";".join(f"{broker}:{count}" for broker, count in counts)
    properties = jvm.package("java.util").Properties()
    properties.setProperty("topic.num.test", text)
    found = jvm.package("java.util").HashMap()
    jvm.metaq.utils.DiamondUtils.getPartitions(properties, found)
    places = dict.fromkeys(one.toString() for one in found.get("test"))
    assert [one.name for one in parse_layout("test", text)] == list(places)
