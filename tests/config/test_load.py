"""Settings from files: the sample, every error, overrides, any bytes."""

import contextlib
import re
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.config.keys import (
    DELETE_POLICY_FORMS,
    LIMITS_KEYS,
    SYSTEM_KEYS,
    ZOOKEEPER_KEYS,
    nearest_key,
)
from metaq.config.load import load_config, parse_config
from metaq.config.settings import (
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    ReplicationConfig,
    SystemConfig,
    TopicConfig,
    ZooKeeperConfig,
)
from metaq.errors import ConfigError
from tests.sampling import examples

# In the manner of a file that has been edited on Windows for years: GBK comments,
# both comment marks, both separators, blanks, arithmetic, legacy sections.
PATH = "/etc/metaq/server.ini"

SAMPLE = """\
; 消息服务器配置文件
#   单位 字节
[system]
brokerId : 7
hostName=
serverPort=8000+123
dashboardHttpPort: 8120
numPartitions = 2
dataPath=/data/meta store
unflushThreshold=0
unflushInterval=10*1000
;一个文件最大 1G
maxSegmentSize=1024*1024*1024
maxTransferSize=1024*1024
deletePolicy=archive, 12h , true
deleteWhen=0 0 6,18 ? * MON-FRI
flushTxLogAtCommit=2
stat=true
updateConsumerOffsets=true
acceptSubscribe=false
topics=nonsense
configFileChecksum=1

[zookeeper]
zk.zkEnable=true
zk.zkConnect=h1:2181,h2:2181/chroot
zk.zkSessionTimeoutMs=30*1000
zk.zkRoot=/metaq/
brokerId=99

[slave]
slaveId=0
anything goes=here

;主题
[topic=test]
stat=no
numPartitions=10
group.A=com.example.FilterA
group.B-1 : com.example.FilterB
group.C=
filterClassNames=x

[topic=wild-*]
deletePolicy=delete,90m
dataPath=/data/wild
unflushThreshold=-1
acceptSubscribe=true
"""

SMALLEST = """\
[system]
brokerId=0
numPartitions=1
unflushThreshold=0
unflushInterval=10000
maxSegmentSize=1024
maxTransferSize=1024
[zookeeper]
zk.zkConnect=localhost:2181
[topic=test]
"""


def parse(text: str, **overrides: str) -> BrokerConfig:
    return parse_config(text.encode(), "conf/server.ini", overrides)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gbk"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_metaq_file_loads_as_it_is(encoding: str, line_end: str) -> None:
    """Comments, separators, commas, arithmetic, legacy sections, useless keys."""
    data = SAMPLE.replace("\n", line_end).encode(encoding)
    config = load_config(PATH, {PATH: data}.__getitem__)
    assert config.data == data
    assert config.checksum == zlib.crc32(data)
    assert config.path == PATH
    assert config.ignored_sections == ("slave",)
    policy = DeletePolicy(DeleteKind.ARCHIVE, 12 * 3_600_000, is_compressed=True)
    assert config.system == SystemConfig(
        broker_id=7,
        server_port=8123,
        partition_count=2,
        data_path="/data/meta store",
        data_log_path="/data/meta store",
        app_class_path="/etc/metaq/../provided",
        unflush_threshold=0,
        delete_policy=policy,
        delete_when="0 0 6,18 ? * MON-FRI",
        flush_tx_log_at_commit=2,
        stat=True,
        update_consumer_offsets=True,
        accept_subscribe=False,
    )
    assert config.zookeeper == ZooKeeperConfig(
        connect="h1:2181,h2:2181/chroot", root="/metaq"
    )
    assert config.limits == LimitsConfig()
    assert list(config.topics) == ["test", "wild-*"]
    inherited = {
        "delete_when": "0 0 6,18 ? * MON-FRI",
        "unflush_interval_ms": 10_000,
        "accept_publish": True,
    }
    assert config.topic("test") == TopicConfig(
        name="test",
        partition_count=10,
        stat=False,
        delete_policy=policy,
        data_path="/data/meta store",
        unflush_threshold=0,
        accept_subscribe=False,
        filters={"A": "com.example.FilterA", "B-1": "com.example.FilterB"},
        **inherited,
    )
    assert config.topic("wild-*") == TopicConfig(
        name="wild-*",
        partition_count=2,
        stat=True,
        delete_policy=DeletePolicy(DeleteKind.DELETE, 90 * 60_000),
        data_path="/data/wild",
        unflush_threshold=-1,
        accept_subscribe=True,
        **inherited,
    )


def test_a_topic_without_a_section_gets_the_system_defaults() -> None:
    """Also one that a pattern section matches: settings do not pass to it."""
    config = parse(SAMPLE)
    topic = config.topic("wild-1")
    assert topic.name == "wild-1"
    assert topic.data_path == config.system.data_path
    assert topic.partition_count == config.system.partition_count
    assert not topic.accept_subscribe
    assert topic.filters == {}


def test_the_smallest_file_has_all_defaults() -> None:
    """Only six keys are required; the journal and the topics follow them."""
    config = parse(SMALLEST)
    assert config.system == SystemConfig(
        segment_bytes_max=1024,
        transfer_bytes_max=1024,
        app_class_path="conf/../provided",
    )
    assert config.system.data_log_path == config.system.data_path
    assert config.system.data_path.endswith("/meta")
    assert config.zookeeper == ZooKeeperConfig()


def test_the_journal_may_lie_elsewhere() -> None:
    """`dataLogPath` wins over the data path that it follows otherwise."""
    config = parse(SMALLEST, dataPath="/data", dataLogPath="/journal")
    assert config.system.data_path == "/data"
    assert config.system.data_log_path == "/journal"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "connectionInFlightBytesMax",
            "1024*1024*1024",
            (
                "inFlightBytesMax: expected at least 1073741824, the largest of "
                "payloadBytesMax, batchBytesMax and connectionInFlightBytesMax, got "
                "268435456"
            ),
        ),
        (
            "inFlightBytesMax",
            "1000",
            (
                "inFlightBytesMax: expected at least 16777216, the largest of "
                "payloadBytesMax, batchBytesMax and connectionInFlightBytesMax, got "
                "1000"
            ),
        ),
    ],
)
def test_bounds_leave_room_for_the_largest_command(
    key: str, value: str, message: str
) -> None:
    """A command that no bound lets in would wait for ever."""
    with pytest.raises(ConfigError) as caught:
        parse(SMALLEST, **{key: value})
    assert str(caught.value) == f"conf/server.ini: [metaq] {message}"


def test_a_bare_file_name_is_good_enough() -> None:
    """MetaQ crashes on a path without a directory."""
    config = parse_config(SMALLEST.encode(), "server.ini")
    assert config.system.app_class_path == "../provided"


def test_limits_have_their_own_section() -> None:
    """A Java broker ignores unknown sections and refuses unknown keys."""
    config = parse(
        SMALLEST
        + "[metaq]\nlineBytesMax=4*1024\nhttpHost=::1\nlogBytesMax=1024*1024*1024*1024"
    )
    assert config.limits == LimitsConfig(
        line_bytes_max=4096, http_host="::1", log_bytes_max=2**40
    )
    assert config.ignored_sections == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "brokerId=0",
            "brokerID=0",
            "[system]: Invalid config key:brokerID,do you mean 'brokerId'?",
        ),
        (
            "brokerId=0",
            "brokerId=0\nmaxSegmentsize=1",
            "[system]: Invalid config key:maxSegmentsize,do you mean 'maxSegmentSize'?",
        ),
        (
            "zk.zkConnect=",
            "zk.connect=",
            "[zookeeper]: Invalid config key:zk.connect,do you mean 'zk.zkConnect'?",
        ),
        (
            "[topic=test]",
            "[topic=test]\nnumPartitons=1",
            (
                "[topic=test]: Invalid config key:numPartitons,"
                "do you mean 'numPartitions'?"
            ),
        ),
        (
            "[topic=test]",
            "[topic=test]\ngroup.=x",
            "[topic=test]: Invalid config key:group.,do you mean 'stat'?",
        ),
        (
            "[topic=test]",
            "[topic=test]\n[metaq]\nidleTimeout=1",
            "[metaq]: Invalid config key:idleTimeout,do you mean 'idleTimeoutMs'?",
        ),
        ("brokerId=0", "", "[system]: Blank value for brokerId"),
        ("brokerId=0", "brokerId=", "[system]: Blank value for brokerId"),
        ("maxTransferSize=1024", "", "[system]: Blank value for maxTransferSize"),
        (
            "brokerId=0",
            "brokerId=1024",
            "[system] brokerId=1024: expected 0..1023, got 1024",
        ),
        ("brokerId=0", "brokerId=-1", "[system] brokerId=-1: expected 0..1023, got -1"),
        (
            "maxSegmentSize=1024",
            "maxSegmentSize=2147483650",
            (
                "[system] maxSegmentSize=2147483650: "
                "expected 1..2147483647, got 2147483650"
            ),
        ),
        (
            "brokerId=0",
            "brokerId=0\nstat=yes",
            "[system] stat=yes: expected true or false",
        ),
        (
            "brokerId=0",
            "brokerId=0\ndeletePolicy=keep,1",
            f"[system] deletePolicy=keep,1: {DELETE_POLICY_FORMS}, got 'keep,1'",
        ),
        (
            "[topic=test]",
            "[topic=test]\ndeletePolicy=delete",
            f"[topic=test] deletePolicy=delete: {DELETE_POLICY_FORMS}, got 'delete'",
        ),
        ("[topic=test]", "[topic=a/b]", "[topic=a/b]: 'a/b' cannot be a topic name"),
        ("[topic=test]", "[topic=]", "[topic=]: '' cannot be a topic name"),
        ("[topic=test]", "[topic=a]\n[topic= a]", "[topic= a]: topic 'a' occurs twice"),
        (
            "[topic=test]",
            "[topic=a(]",
            (
                "[topic=a(]: 'a(' is no topic pattern: missing ), "
                "unterminated subpattern at position 1"
            ),
        ),
        ("[topic=test]", "", "Empty topics list, expected a section [topic=NAME]"),
        ("[system]", "[sytem]", "section [system] is missing"),
        (
            "zk.zkConnect=localhost:2181",
            "",
            (
                "[zookeeper]: Null "
                "zookeeper config, expected zk.zkConnect, or zk.zkEnable=false"
            ),
        ),
        (
            "[zookeeper]\nzk.zkConnect=localhost:2181",
            "",
            (
                ""
                "[zookeeper]: Null zookeeper config, expected zk.zkConnect, or "
                "zk.zkEnable=false"
            ),
        ),
        (
            "zk.zkConnect=localhost:2181",
            "zk.zkConnect=",
            "[zookeeper]: Empty zookeeper servers, zk.zkConnect is blank",
        ),
        (
            "[topic=test]",
            "[topic=t]\n[zk]\nx=1\n[metaq]\nhttpHost=a\0b",
            (
                "[metaq] httpHost: expected at most 4096 printable "
                "characters, got 3 characters"
            ),
        ),
    ],
)
def test_every_mistake_has_its_sentence(old: str, new: str, message: str) -> None:
    """File, section, key, value, and both numbers where there are two."""
    assert old in SMALLEST
    with pytest.raises(ConfigError) as caught:
        parse(SMALLEST.replace(old, new))
    assert str(caught.value) == f"conf/server.ini: {message}"


@pytest.mark.parametrize(
    ("text", "root"),
    [("/a", "/a"), ("a", "/a"), ("a/b/", "/a/b"), ("/", "/"), ("", "/meta")],
)
def test_the_root_is_a_path_however_it_is_written(text: str, root: str) -> None:
    """A slash before it and none behind it, as a Java broker reads it."""
    connect = "zk.zkConnect=localhost:2181"
    found = parse(SMALLEST.replace(connect, f"{connect}\nzk.zkRoot={text}"))
    assert found.zookeeper.root == root


def test_zookeeper_off_needs_no_servers() -> None:
    """`zk.zkEnable=false` is enough, with a blank zkConnect or none."""
    for text in ("zk.zkEnable=false", "zk.zkConnect=\nzk.zkEnable=false"):
        config = parse(SMALLEST.replace("zk.zkConnect=localhost:2181", text))
        assert not config.zookeeper.is_enabled


def test_zookeeper_defaults_to_this_machine_once_anything_is_set() -> None:
    """As in MetaQ, one key of the section brings the others' defaults."""
    config = parse(SMALLEST.replace("zk.zkConnect=localhost:2181", "zk.zkSyncTimeMs=1"))
    assert config.zookeeper == ZooKeeperConfig(sync_time_ms=1)
    assert config.zookeeper.connect == "localhost:2181"
    assert config.zookeeper.root == "/meta"


def test_overrides_win_over_the_file() -> None:
    """A bare key goes to the section that knows it, NAME:key to a topic."""
    config = parse(
        SMALLEST,
        **{
            "serverPort": "9000",
            "numPartitions": "3",
            "zk.zkEnable": "false",
            "idleTimeoutMs": " 60*1000 ",
            "test:numPartitions": "5",
            "new:stat": "true",
            "plain:numPartitions": "",
            "a:b:acceptPublish": "false",
        },
    )
    assert config.system.server_port == 9000
    assert config.system.partition_count == 3
    assert not config.zookeeper.is_enabled
    assert config.limits.idle_timeout_ms == 60_000
    assert config.topic("test").partition_count == 5
    assert list(config.topics) == ["test", "new", "plain", "a:b"]
    assert config.topic("new").stat
    assert config.topic("plain").partition_count == 3
    assert not config.topic("a:b").accept_publish
    assert parse_config(config.data, config.path).topics == config.topics


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "serverport",
            "1",
            "override: Invalid config key:serverport,do you mean 'serverPort'?",
        ),
        (
            "test:partitions",
            "1",
            "[topic=test]: Invalid config key:partitions,do you mean 'numPartitions'?",
        ),
        (
            "serverPort",
            "99999",
            "[system] serverPort=99999: expected 0..65535, got 99999",
        ),
        ("brokerId", "", "[system]: Blank value for brokerId"),
        ("../x:stat", "true", "[topic=../x]: '../x' cannot be a topic name"),
    ],
)
def test_a_wrong_override_is_refused_like_a_wrong_line(
    key: str, value: str, message: str
) -> None:
    """The same rules, the same sentences."""
    with pytest.raises(ConfigError) as caught:
        parse(SMALLEST, **{key: value})
    assert str(caught.value) == f"conf/server.ini: {message}"


def test_the_nearest_key_is_the_one_with_the_fewest_changes() -> None:
    """The first wins among equals; a huge name costs nothing."""
    assert nearest_key("kitten", ["mitten", "sitting"]) == "mitten"
    assert nearest_key("b", ["aa", "bb", "ab"]) == "bb"
    assert nearest_key("x" * 10**6, ["a", "x" * 40]) == "x" * 40


def test_a_huge_unknown_key_is_cut_in_the_message() -> None:
    """An error message stays readable."""
    with pytest.raises(ConfigError) as caught:
        parse(SMALLEST.replace("brokerId=0", "k" * 100_000 + "=1"))
    assert len(str(caught.value)) < 250


@settings(max_examples=examples(60))
@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.sampled_from(
                [*SAMPLE.splitlines(), "[metaq]", "=", "[topic=[[a]", "[topic=a**]",
                 "brokerId=9**9**9", "[topic=a{9999999999}]", "deletePolicy=,",
                 "deletePolicy=delete,٣", "httpHost=\x85"]
            ),
            max_size=40,
        ).map(lambda lines: "\n".join(lines).encode()),
    )
)  # fmt: skip
def test_any_bytes_are_settings_or_a_config_error(data: bytes) -> None:
    """Nothing else comes out of a file, whatever is in it."""
    with contextlib.suppress(ConfigError):
        parse_config(data, "server.ini")


@settings(max_examples=examples(60))
@given(
    st.sampled_from(
        [key.name for key in (*SYSTEM_KEYS, *ZOOKEEPER_KEYS, *LIMITS_KEYS)]
    ),
    st.one_of(st.text(max_size=12), st.text("0123456789*,smh-/delt", max_size=12)),
)
def test_any_value_is_taken_or_a_config_error(key: str, value: str) -> None:
    """No value of any key raises anything else."""
    with contextlib.suppress(ConfigError):
        parse(SMALLEST, **{key: value})


@pytest.mark.parametrize(
    ("section", "meant"),
    [
        ("topik=orders", "topic=orders"),
        ("topic:orders", "topic=orders"),
        ("topic orders", "topic=orders"),
        ("Topic : orders", "topic=orders"),
        ("topics=orders", "topic=orders"),
        ("Topic=orders", "topic=orders"),
        ("topic = orders", "topic=orders"),
        ("topic", "topic=NAME"),
        ("zookeper", "zookeeper"),
        ("ZooKeeper", "zookeeper"),
        ("sytsem", "system"),
        ("metq", "metaq"),
    ],
)
def test_a_misspelt_section_is_refused(section: str, meant: str) -> None:
    """Else all that it says would be lost."""
    with pytest.raises(ConfigError) as refused:
        parse(f"{SMALLEST}\n[{section}]\nnumPartitions=3\n")
    assert str(refused.value) == (
        f"conf/server.ini: Invalid config section:[{section}],do you mean '[{meant}]'?"
    )


@pytest.mark.parametrize("section", ["slave", "gregor", "notify=a", "kafka.topics"])
def test_a_foreign_section_is_ignored(section: str) -> None:
    """As MetaQ does; the start warns of it."""
    config = parse(f"{SMALLEST}\n[{section}]\nanything=3\n")
    assert config.ignored_sections == (section,)


def test_an_override_that_a_topic_does_not_get_is_told() -> None:
    """Its own section wins, unless the override names the topic."""
    text = SMALLEST.replace("[topic=", "[topic=kept]\ndeletePolicy=delete,24h\n[topic=")
    config = parse(text, deletePolicy="delete,1h", brokerId="4")
    assert config.shadowed == (
        (
            "deletePolicy=delete,1h was set for the broker, but [topic=kept] says"
            " deletePolicy=delete,24h"
        ),
    )
    both = {"deletePolicy": "delete,1h", "kept:deletePolicy": "delete,1h"}
    assert parse(text, **both).shadowed == ()
    assert parse(text).shadowed == ()


def test_checksum_and_text_are_those_of_what_is_in_effect() -> None:
    """The file's own bytes without overrides; else a text that says the same again."""
    plain = parse(SMALLEST)
    assert (plain.data, plain.checksum) == (SMALLEST.encode(), zlib.crc32(plain.data))
    config = parse(SMALLEST, **{"serverPort": "9000", "more:numPartitions": "3"})
    assert config.checksum == zlib.crc32(config.data) != plain.checksum
    again = parse_config(config.data, config.path)
    assert (again.system, again.topics) == (config.system, config.topics)
    assert again.checksum == config.checksum


SET = SMALLEST + "\n[replication]\nreplicaId=2\n"


def test_a_section_makes_a_broker_a_replica() -> None:
    """Its number is required, its session is short, and a value of the file wins."""
    config = parse(SET)
    assert config.replication == ReplicationConfig(replica_id=2, lag_timeout_ms=3000)
    assert config.zookeeper.session_timeout_ms == 6000
    slow = parse(SET, **{"zk.zkSessionTimeoutMs": "20000"})
    assert slow.zookeeper.session_timeout_ms == 20_000
    assert parse(SMALLEST).replication is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"replicaId": ""}, "Blank value for replicaId"),
        ({"replicaId": "10"}, "expected 1..9, got 10"),
        ({"zk.zkEnable": "false"}, "needs zk.zkEnable=true"),
        ({"unflushThreshold": "5"}, "needs unflushThreshold=0 or less, got 5"),
        ({"test:unflushThreshold": "7"}, "needs unflushThreshold=0 or less, got 7"),
    ],
)
def test_settings_that_a_set_cannot_keep_are_refused(override, message: str) -> None:
    """A replica that acknowledges before a sync would break the promise of all."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(SET, **override)
