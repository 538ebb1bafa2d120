"""Every command and reply: canonical bytes, three ways of reading, round trips."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.model import NULL_TRANSACTION, LocalTransactionId, XaTransactionId
from metaq.protocol.commands import (
    OPAQUE_MISSING,
    OWN_TIMES,
    Answer,
    Cancel,
    Check,
    Command,
    CommitTogether,
    CountQuestion,
    Find,
    Follow,
    Get,
    Listen,
    ListScheduled,
    Mput,
    OffsetQuery,
    Put,
    Quit,
    Reply,
    Result,
    Settle,
    SplitQuestion,
    Stats,
    Sync,
    Take,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.connection import NEED_DATA, Connection, Event, Role, WireLimits
from metaq.protocol.encoding import encode
from tests.cases import for_each
from tests.rigs.pair import ConnectionPair, drain
from tests.rigs.strategies import commands, cuts, replies

LOCAL = LocalTransactionId("test", 1)
XA = XaTransactionId(101, b"\x0a\x0b", b"", "uq")
BEGIN = TransactionType.BEGIN
COMMIT = TransactionType.COMMIT_ONE_PHASE
MAILBOX = "0f" * 16
SESSION = LocalTransactionId("sessionId", 99)

# (value, canonical bytes): what encode writes and decode reads. The Java unit tests of
# docs/metaq-1.4/broker.md 11.1 assert most of them.
CANONICAL: list[tuple[Command | Reply, bytes]] = [
    (Put("test", 1, b"hello", 0, -1, 0), b"put test 1 5 0 -1 0\r\nhello"),
    (
        Put("test", 1, b"hello", 0, -1, 0, LOCAL),
        b"put test 1 5 0 -1 TX:test:1 0\r\nhello",
    ),
    (
        Put("t", -1, b"", -1, 0, -(2**31), XA),
        b"put t -1 0 -1 0 XID:101:0a0b::uq -2147483648\r\n",
    ),
    (
        Put("t", 0, b"x", 0, 7, 2, NULL_TRANSACTION),
        b"put t 0 1 0 7 null 2\r\nx",
    ),
    (Put("主题", 0, b"\r\n\r\n", 0, 1, 2), "put 主题 0 4 0 1 2\r\n\r\n\r\n".encode()),
    (
        Sync("test", 1, b"hello", 0, 9999, 777, 0),
        b"sync test 1 5 0 9999 777 0\r\nhello",
    ),
    (
        Mput("t", 0, 2, 77, 9, b"payload", "host-1.a~b", 2**63 - 1),
        b"mput t 0 7 2 77 host-1.a~b 9223372036854775807 9\r\npayload",
    ),
    (Check("test", 0, 375, 125, -4), b"check test 0 375 125 -4\r\n"),
    (Check("t", -1, 2**63 - 1, -1, 0), b"check t -1 9223372036854775807 -1 0\r\n"),
    (
        Take("test", "g", -1, 32, 1048576, 5, "w1", 30000, 3000),
        b"take test g -1 32 1048576 5 lease=30000 worker=w1 wait=3000\r\n",
    ),
    (
        Take("t", "g", 0, 1, 1, -7, "w~._-1", generation=0),
        b"take t g 0 1 1 -7 worker=w~._-1 generation=0\r\n",
    ),
    (
        Settle("test", "g", 0, 2, b"\r\n\0", 5, "w1"),
        b"settle test g 0 2 3 5 worker=w1\r\n\r\n\0",
    ),
    (
        Settle("test", "g", 0, 1, b"", 5, "w1", LOCAL, 7),
        b"settle test g 0 1 0 5 worker=w1 generation=7 tx=TX:test:1\r\n",
    ),
    (
        Mput("t", 0, 2, 77, 9, b"payload", "p", 3, deliver_ms=1_700_000_000_000),
        b"mput t 0 7 2 77 p 3 9 deliver=1700000000000\r\npayload",
    ),
    (
        Mput("t", 0, 2, 77, 9, b"", transaction=LOCAL, deliver_ms=0),
        b"mput t 0 0 2 77 - -1 TX:test:1 9 deliver=0\r\n",
    ),
    (
        Mput("t", 0, 2, 77, 9, b"", "p", 3, deliver_ms=OWN_TIMES),
        b"mput t 0 0 2 77 p 3 9 deliver=each\r\n",
    ),
    (Cancel("test", b"0 375 9 1", -5), b"cancel test 9 -5\r\n0 375 9 1"),
    (Find("t", 0, b"key=a b", -5, 10), b"find t 0 7 -5 limit=10\r\nkey=a b"),
    (
        Find("t", -1, b"", 5, 0, 7, 8, 9),
        b"find t -1 0 5 limit=0 below=7 since=8 until=9\r\n",
    ),
    (Value(b"", 9, 7, 8), b"value 0 9 next=7 read=8\r\n"),
    (ListScheduled("*", 10, 5), b"scheduled * 10 5\r\n"),
    (
        ListScheduled("test", 0, -5, 2**63 - 1, 7),
        b"scheduled test 0 -5 from=9223372036854775807 to=7\r\n",
    ),
    (Listen(MAILBOX, -5, 30_000), b"listen %b -5 wait=30000\r\n" % MAILBOX.encode()),
    (Listen(MAILBOX, 5), b"listen %b 5\r\n" % MAILBOX.encode()),
    (
        Answer(MAILBOX, 2**63 - 1, b"\r\n", -5),
        b"answer %b 9223372036854775807 2 -5\r\n\r\n" % MAILBOX.encode(),
    ),
    (Value(b"hello", 99, 7), b"value 5 99 next=7\r\nhello"),
    (Follow("pull", b"\r\n\0", -7), b"follow pull 3 -7\r\n\r\n\0"),
    (Follow("join", b"", 0), b"follow join 0 0\r\n"),
    (Mput("t", -1, 0, -1, 9, b""), b"mput t -1 0 0 -1 - -1 9\r\n"),
    (
        Mput("t", 0, 2, 77, -9, b"payload", transaction=LOCAL),
        b"mput t 0 7 2 77 - -1 TX:test:1 -9\r\npayload",
    ),
    (
        Get("test", "boyan-group", 1, 1000, 1048576, -3),
        b"get test boyan-group 1 1000 1048576 -3\r\n",
    ),
    (
        Get("t", "g", 0, 2**63 - 1, 1, 2, 3000),
        b"get t g 0 9223372036854775807 1 2 wait=3000\r\n",
    ),
    (
        Get("t", "g", 0, 0, 25, 2, 5, "'é' \r\n\"%\">=+1.5"),
        b"get t g 0 0 25 2 wait=5 where='%C3%A9'%20%0D%0A\"%25\">=+1.5\r\n",
    ),
    (Get("t", "g", 0, 0, 25, 2, where=""), b"get t g 0 0 25 2 where=\r\n"),
    (
        OffsetQuery("test", "boyan-test", 1, 1000, -1),
        b"offset test boyan-test 1 1000 -1\r\n",
    ),
    (
        OffsetQuery("t", "g", 1, 1000, -1, TimeQuestion(5)),
        b"offset t g 1 1000 -1 time=5\r\n",
    ),
    (
        OffsetQuery("t", "g", 1, 1000, -1, CountQuestion(2**63 - 1)),
        b"offset t g 1 1000 -1 count=9223372036854775807\r\n",
    ),
    (
        OffsetQuery("t", "g", 1, 1000, -1, SplitQuestion(2000, 2**31 - 1)),
        b"offset t g 1 1000 -1 boundaries=2000,2147483647\r\n",
    ),
    (Version(999), b"version 999\r\n"),
    (Stats("", -1000), b"stats  -1000\r\n"),
    (Stats("topics", -1000), b"stats topics -1000\r\n"),
    (
        TransactionCommand(SESSION, "sessionId", COMMIT, 100),
        b"transaction TX:sessionId:99 sessionId COMMIT_ONE_PHASE 100\r\n",
    ),
    (
        TransactionCommand(SESSION, "sessionId", BEGIN, 100, 3),
        b"transaction TX:sessionId:99 sessionId BEGIN 3 100\r\n",
    ),
    (
        TransactionCommand(SESSION, "sessionId", BEGIN, 100, 0, "unique"),
        b"transaction TX:sessionId:99 sessionId BEGIN unique 100\r\n",
    ),
    (
        TransactionCommand(XA, "s1", BEGIN, 100, 60, "q"),
        b"transaction XID:101:0a0b::uq s1 BEGIN 60 q 100\r\n",
    ),
    (
        TransactionCommand(XA, "s1", BEGIN, 100, 0, "12345"),
        b"transaction XID:101:0a0b::uq s1 BEGIN 0 12345 100\r\n",
    ),
    (
        TransactionCommand(NULL_TRANSACTION, "s1", TransactionType.RECOVER, 12, 0, "q"),
        b"transaction null s1 RECOVER q 12\r\n",
    ),
    (
        CommitTogether("s1", 2, 10, b"XID:1:0a:01:uq\r\nXID:1:0a:02:uq\r\n"),
        (
            b"transactions s1 COMMIT_TOGETHER 2 32 10\r\n"
            b"XID:1:0a:01:uq\r\nXID:1:0a:02:uq\r\n"
        ),
    ),
    (Result(404, b"not found", 99), b"result 404 9 99\r\nnot found"),
    (Result(404, b"", 99), b"result 404 0 99\r\n"),
    (Result(200, "线程池".encode(), -1), "result 200 9 -1\r\n线程池".encode()),
    (Value(b"hello", 99), b"value 5 99\r\nhello"),
    (Value(b"", 99), b"value 0 99\r\n"),
]

# (value, other bytes that mean the same)
SYNONYMS: list[tuple[Command | Reply, bytes]] = [
    (Put("t", 0, b"hello", 0, -1, 7), b"put t 0 5 0 7\r\nhello"),
    (Put("t", 0, b"hello", 0, -1, 7, LOCAL), b"put t 0 5 0 TX:test:1 7\r\nhello"),
    (Put("t", 0, b"hello", 0, -1, 7, NULL_TRANSACTION), b"put t 0 5 0 null 7\r\nhello"),
    (Put("t", 0, b"hello", 0, 12, 7), b"put t +0 05 -0 12 +7 \r\nhello"),
    (Put("", 0, b"", 0, -1, 7), b"put  0 0 0 7\r\n"),
    (Put("t\r", 0, b"", 0, -1, 7), b"put t\r 0 0 0 7\r\n"),
    (Put("t�", 0, b"", 0, -1, 7), b"put t\xff 0 0 0 7\r\n"),
    (Sync("t", 0, b"hello", 0, -5, -1, 7), b"sync t 0 5 0 -5 7\r\nhello"),
    (Mput("t", 0, 1, -1, 9, b""), b"mput t 0 0 1 -1 - -1 9 acks=1 x\r\n"),
    (Mput("t", 0, 1, -1, 9, b""), b"mput t 0 0 1 -1 - -1 +9\r\n"),
    (Get("t", "g", 0, 0, 25, 18), b"get t g 0 0 25 18 extra\r\n"),
    (
        Get("t", "g", 0, 0, 25, 18, 5, "a=1"),
        b"get t g 0 0 25 18 x where=%61=1 wait=5 where=b\r\n",
    ),
    (
        Get("t", "g", 0, 0, 25, 18, 5),
        b"get t g 0 0 25 18 a wait=x wait= wait=5 wait=6\r\n",
    ),
    (Get("t", "g", 0, 0, 25, 18, 2**31 - 1), b"get t g 0 0 25 18 wait=2147483648\r\n"),
    (
        Get("t", "g", 0, 0, 25, 18, 2**31 - 1),
        b"get t g 0 0 25 18 wait=%s\r\n" % (b"9" * 60),
    ),
    (OffsetQuery("t", "g", 0, 0, 1), b"offset t g 0 0 1 x y\r\n"),
    (
        OffsetQuery("t", "g", 0, 0, 1),
        b"offset t g 0 0 1 time= count=-1 count=1,2 boundaries=5 count=+1 time\r\n",
    ),
    (
        OffsetQuery("t", "g", 0, 0, 1, CountQuestion(7)),
        b"offset t g 0 0 1 time=x count=07 time=5\r\n",
    ),
    (
        OffsetQuery("t", "g", 0, 0, 1, SplitQuestion(2**63 - 1, 2**31 - 1)),
        b"offset t g 0 0 1 boundaries=%s,%s\r\n" % (b"9" * 19, b"9" * 60),
    ),
    (Check("t", 0, 25, 5, 18), b"check t 0 25 5 18 deep=1 x\r\n"),
    (
        Take("t", "g", 0, 1, 9, 5, "w", 0, 2),
        b"take t g 0 1 9 5 x lease=a wait=2 worker=w worker=v\r\n",
    ),
    (
        Settle("t", "g", 0, 1, b"", 5, "w"),
        b"settle t g 0 1 0 5 x worker=w y generation=x\r\n",
    ),
    (
        Mput("t", 0, 1, -1, 9, b"", deliver_ms=2**63 - 1),
        b"mput t 0 0 1 -1 - -1 9 x deliver=%s deliver=x\r\n" % (b"9" * 60),
    ),
    (Cancel("t", b"", 5), b"cancel t 0 5 x\r\n"),
    (
        Find("t", 0, b"", 5, 2**31 - 1),
        b"find t 0 0 5 x since=-1 below=%s limit=%s until=x\r\n" % (2 * (b"9" * 60,)),
    ),
    (Find("t", 0, b"", 5, 1), b"find t 0 0 5\r\n"),
    (
        Listen(MAILBOX, 5, 7),
        b"listen %b 5 x wait=a wait=7 wait=8\r\n" % MAILBOX.encode(),
    ),
    (Answer(MAILBOX, 7, b"", 5), b"answer %b 07 0 5 x\r\n" % MAILBOX.encode()),
    (
        ListScheduled("t", 1, 5, 0, 7),
        b"scheduled t +1 5 x from=-1 to=07 to=9 until=1\r\n",
    ),
    (Value(b"", 9, 2**63 - 1), b"value 0 9 x next=%s\r\n" % (b"9" * 60)),
    (Value(b"", 9), b"value 0 9 next=-1 next\r\n"),
    (Version(OPAQUE_MISSING), b"version\r\n"),
    (Version(OPAQUE_MISSING), b"v\r\n"),
    (Version(3), b"vxyz 3 4 5\r\n"),
    (Version(3), b"version 3  \r\n"),
    (Stats("", OPAQUE_MISSING), b"stats\r\n"),
    (Stats("7", OPAQUE_MISSING), b"stats 7\r\n"),
    (Stats("topics", 5), b"stats topics 5 x\r\n"),
    (Quit(), b"quit\r\n"),
    (Quit(), b"qfoo bar\r\n"),
    (
        TransactionCommand(LOCAL, "s", BEGIN, 1, 123),
        b"transaction TX:test:1 s BEGIN 123 1\r\n",
    ),
    (
        TransactionCommand(LOCAL, "s", BEGIN, 1, -5, "q"),
        b"transaction TX:test:1 s BEGIN -5 q 1\r\n",
    ),
    (
        TransactionCommand(
            XaTransactionId(100, b"\xab", b"\xbb", "uq"), "s1", BEGIN, 68
        ),
        b"transaction XID:100:ABc:bb:uq s1 BEGIN 68\r\n",
    ),
    (Result(299, b"ok", 5), b"result 299 2 5 extra\r\nok"),
    (Value(b"ab", 5), b"value 2 5 extra\r\nab"),
]


def reader_of(value: Command | Reply) -> Connection:
    role = Role.CLIENT if isinstance(value, Result | Value) else Role.SERVER
    return Connection(role, WireLimits())


@for_each("value, raw", CANONICAL)
def test_encoding_writes_the_canonical_bytes(
    value: Command | Reply, raw: bytes
) -> None:
    """We send the same as Java, byte by byte."""
    assert encode(value) == raw


@for_each("value, raw", CANONICAL + SYNONYMS)
def test_reading_three_ways_gives_the_value(value: Command | Reply, raw: bytes) -> None:
    """Whole; byte by byte with "not yet" at every prefix; with bytes after it."""
    whole = reader_of(value)
    whole.receive_data(raw)
    assert drain(whole) == [value]
    assert whole.buffer.unread_bytes == 0

    trickle = reader_of(value)
    for number in range(len(raw) - 1):
        trickle.receive_data(raw[number : number + 1])
        assert trickle.next_event() is NEED_DATA
    trickle.receive_data(raw[-1:])
    assert drain(trickle) == [value]

    followed = reader_of(value)
    followed.receive_data(raw + raw + raw[:2])
    expected = [value] if isinstance(value, Quit) else [value, value]
    assert drain(followed) == expected


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(commands(), max_size=4), st.data())
def test_any_cut_of_the_bytes_gives_the_same_commands(
    sent: list[Command], data: st.DataObject
) -> None:
    """Cuts of the stream by TCP change nothing, and nothing is left."""
    raw = b"".join(map(encode, sent))
    server = Connection(Role.SERVER, WireLimits())
    heard: list[Event] = []
    for piece in data.draw(cuts(raw)):
        server.receive_data(piece)
        heard += drain(server)
    assert heard == sent
    assert server.buffer.unread_bytes == 0
    assert server.is_between_frames


@given(st.lists(replies(), max_size=4), st.data())
def test_any_cut_of_the_bytes_gives_the_same_replies(
    sent: list[Reply], data: st.DataObject
) -> None:
    """The same for the way back."""
    raw = b"".join(map(encode, sent))
    client = Connection(Role.CLIENT, WireLimits())
    heard: list[Event] = []
    for piece in data.draw(cuts(raw)):
        client.receive_data(piece)
        heard += drain(client)
    assert heard == sent


def test_a_pair_hears_what_it_says() -> None:
    """Commands go one way and replies the other."""
    pair = ConnectionPair()
    assert pair.ask(Version(1), Stats("", 2)) == [Version(1), Stats("", 2)]
    assert pair.answer(Result(200, b"x", 1)) == [Result(200, b"x", 1)]


def test_the_text_of_a_result_is_its_body() -> None:
    """Bodies are UTF-8; what is not stays readable."""
    assert Result(200, "é".encode(), 1).text == "é"
    assert Result(200, b"\xff", 1).text == "�"
