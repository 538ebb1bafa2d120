"""Payloads: golden bytes, round trips, tolerance and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.model import BrokerAddress, BrokerId, GroupOffset, MessageId, Offset
from metaq.zk import znodes
from metaq.zk.errors import PayloadError
from metaq.zk.paths import BrokerRole, NodeKind
from metaq.zk.znodes import TopicRegistration
from tests.zk.golden_nodes import GOLDEN, kind_of

LEADER = BrokerRole(BrokerId(0))

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
ADDRESS: Codec = (znodes.encode_address, znodes.decode_address)
CHECKSUM: Codec = (znodes.encode_checksum, int)
COUNT: Codec = (znodes.encode_partition_count, znodes.decode_partition_count)
REGISTRATION: Codec = (znodes.encode_registration, znodes.decode_registration)
TOPICS: Codec = (znodes.encode_member_topics, znodes.decode_member_topics)
OWNER: Codec = (znodes.encode_owner, znodes.decode_owner)
DIRECTORIES: Codec = (znodes.encode_directories, znodes.decode_directories)
OFFSET: Codec = (znodes.encode_group_offset, znodes.decode_group_offset)
CODECS: dict[NodeKind, Codec] = {
    NodeKind.BROKER: ADDRESS,
    NodeKind.LEADER: ADDRESS,
    NodeKind.FOLLOWER: ADDRESS,
    NodeKind.CONFIG_CHECKSUM: CHECKSUM,
    NodeKind.TOPIC: COUNT,
    NodeKind.TOPIC_PUB: REGISTRATION,
    NodeKind.TOPIC_SUB: REGISTRATION,
    NodeKind.MEMBER: TOPICS,
    NodeKind.OWNER: OWNER,
    NodeKind.GROUP_OFFSET: OFFSET,
    NodeKind.RECORDED_BROKER: ADDRESS,
    NodeKind.RECORDED_PARTITIONS: COUNT,
    NodeKind.RECORDED_DIRECTORIES: DIRECTORIES,
}
ONLY_WRITTEN = {NodeKind.CONFIG_CHECKSUM}
"""No part of this package reads them."""


def test_every_node_of_metaq_has_a_codec() -> None:
    """Nodes of ours alone are coded where they are made."""
    assert set(NodeKind) - set(CODECS) == {
        NodeKind.QUERY_START,
        NodeKind.QUERY_ROUTES,
        NodeKind.QUERY_DECISION,
        NodeKind.GROUP_DECISION,
        NodeKind.GROUP_TOKEN,
        NodeKind.GROUP_FILTER,
        NodeKind.REPLICA_SET,
        NodeKind.SET_LEADER,
        NodeKind.SET_MEMBER,
        NodeKind.SET_PRESENT,
        NodeKind.TOPIC_DEFINITION,
        NodeKind.QUEUE_GROUP,
        NodeKind.EXCHANGE,
        NodeKind.BINDING,
        NodeKind.TOPIC_STATUS,
    }


@pytest.mark.parametrize("tree", GOLDEN)
def test_golden_payloads_survive_decode_and_encode(tree: str) -> None:
    """A payload of a real broker or client is understood and written back the same."""
    seen = 0
    for node in GOLDEN[tree]:
        kind = kind_of(node["path"])
        if kind is None or not node["data"]:
            continue
        encode, decode = CODECS[kind]
        data = node["data"].encode()
        assert encode(decode(data)) == data
        seen += 1
    assert seen or tree == "after_clean_stop"


EXACT: list[tuple[Codec, Any, bytes]] = [
    (ADDRESS, BrokerAddress("127.0.0.1", 8123), b"meta://127.0.0.1:8123"),
    (
        ADDRESS,
        BrokerAddress("0:0:0:0:0:0:0:1", 8123),
        b"meta://[0:0:0:0:0:0:0:1]:8123",
    ),
    (CHECKSUM, 1426681538, b"1426681538"),
    (CHECKSUM, 2**32 - 1, b"4294967295"),
    (COUNT, 2, b"2"),
    (REGISTRATION, TopicRegistration(2, LEADER), b'{"numParts":2,"broker":"0-m"}'),
    (
        REGISTRATION,
        TopicRegistration(4, BrokerRole(BrokerId(3), 1)),
        b'{"numParts":4,"broker":"3-s1"}',
    ),
    (TOPICS, ("test", "meta-test"), b"test,meta-test"),
    (TOPICS, (), b""),
    (OWNER, "g_c1", b"g_c1"),
    (OFFSET, GroupOffset(Offset(108), MessageId(-5468)), b"-5468-108"),
    (OFFSET, GroupOffset(Offset(100), MessageId(-1)), b"-1-100"),
    (OFFSET, GroupOffset(Offset(100), MessageId(7)), b"7-100"),
    (OFFSET, GroupOffset(Offset(100)), b"100"),
    (OFFSET, GroupOffset(Offset(0), MessageId(-(2**63))), b"-9223372036854775808-0"),
]


@pytest.mark.parametrize(("codec", "value", "data"), EXACT)
def test_each_payload_has_its_exact_bytes(
    codec: Codec, value: object, data: bytes
) -> None:
    """Encoding gives MetaQ's bytes, decoding gives the value back."""
    encode, decode = codec
    assert encode(value) == data
    assert decode(data) == value


TOLERATED: list[tuple[Codec, bytes, Any]] = [
    (ADDRESS, b" meta://h:1\n", BrokerAddress("h", 1)),
    (ADDRESS, b"meta://h:1?slaveId=3", BrokerAddress("h", 1)),
    (ADDRESS, b"meta://h:1/", BrokerAddress("h", 1)),
    (ADDRESS, b"meta://::1:8123", BrokerAddress("::1", 8123)),
    (COUNT, b"2\r\n", 2),
    (
        REGISTRATION,
        b' { "broker" : "0-m", "new": [1], "numParts" : 2 } ',
        TopicRegistration(2, LEADER),
    ),
    (
        REGISTRATION,
        b'{"numParts":"2","broker":"0-m"}',
        TopicRegistration(2, LEADER),
    ),
    (TOPICS, b" a, ,b,", ("a", "b")),
    (OWNER, b" g_c\n", "g_c"),
    (OFFSET, b" 5-100 ", GroupOffset(Offset(100), MessageId(5))),
]


@pytest.mark.parametrize(("codec", "data", "value"), TOLERATED)
def test_other_writers_are_understood(codec: Codec, data: bytes, value: object) -> None:
    """White space, property order and unknown properties do not matter."""
    assert codec[1](data) == value


REFUSED: list[tuple[Codec, bytes]] = [
    (ADDRESS, b""),
    (ADDRESS, b"meta://h"),
    (ADDRESS, b"meta://:8123"),
    (ADDRESS, b"http://h:1"),
    (ADDRESS, b"meta://h:0"),
    (ADDRESS, b"meta://h:65536"),
    (ADDRESS, b"meta://a/b:1"),
    (ADDRESS, b"\xff"),
    (COUNT, b"two"),
    (COUNT, b"9" * 5000),
    (REGISTRATION, b""),
    (REGISTRATION, b"null"),
    (REGISTRATION, b"[]"),
    (REGISTRATION, b"2"),
    (REGISTRATION, b"{"),
    (REGISTRATION, b"[" * 200_000),
    (REGISTRATION, b'{"numParts":' + b"9" * 5000 + b',"broker":"0-m"}'),
    (REGISTRATION, b'{"numParts":true,"broker":"0-m"}'),
    (REGISTRATION, b'{"numParts":-1,"broker":"0-m"}'),
    (REGISTRATION, b'{"numParts":null,"broker":"0-m"}'),
    (REGISTRATION, b'{"numParts":2}'),
    (REGISTRATION, b'{"numParts":2,"broker":"0"}'),
    (TOPICS, b"\xff"),
    (OWNER, b"  "),
    (OFFSET, b""),
    (OFFSET, b"-"),
    (OFFSET, b"-5"),
    (OFFSET, b"5-"),
    (OFFSET, b"a-5"),
    (OFFSET, b"5--"),
    (OFFSET, b"1-9223372036854775808"),
    (OFFSET, b"9223372036854775808-1"),
]


@pytest.mark.parametrize(("codec", "data"), REFUSED)
def test_nonsense_is_a_payload_error(codec: Codec, data: bytes) -> None:
    """An invalid payload raises one error that quotes no more than a line."""
    with pytest.raises(PayloadError) as caught:
        codec[1](data)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("kind", [k for k in CODECS if k not in ONLY_WRITTEN])
@given(data=st.binary(max_size=40))
@example(data=b"{}")
def test_any_bytes_decode_or_raise_a_payload_error(kind: NodeKind, data: bytes) -> None:
    """No bytes in ZooKeeper can raise anything but PayloadError in a reader."""
    encode, decode = CODECS[kind]
    try:
        value = decode(data)
    except PayloadError:
        return
    assert decode(encode(value)) == value


ids = st.integers(-(2**63), 2**63 - 1).map(MessageId)
offsets = st.integers(0, 2**63 - 1).map(Offset)


@given(st.builds(GroupOffset, offset=offsets, message_id=st.none() | ids))
def test_group_offsets_round_trip(value: GroupOffset) -> None:
    """Any id, negative ones included, and any offset come back."""
    assert znodes.decode_group_offset(znodes.encode_group_offset(value)) == value


def test_data_directories_are_read_as_they_were_written() -> None:
    """Exact bytes, and a refusal of every other shape."""
    directories = {"/b": ("b2", 3), "/a": ("a1", 0)}
    data = znodes.encode_directories(directories)
    assert data == b'{"/a":["a1",0],"/b":["b2",3]}'
    assert znodes.decode_directories(b" " + data) == directories
    for bad in (b"[]", b'{"/a":[1]}', b'{"/a":["x","y"]}', b'{"/a":5}', b"x"):
        with pytest.raises(PayloadError):
            znodes.decode_directories(bad)
