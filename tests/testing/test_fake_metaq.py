"""The fake MetaQ broker gives the answers that were recorded from a Java broker."""

import re
from functools import cache
from typing import cast

from metaq.config.load import parse_config
from metaq.errors import RemoteProtocolError
from metaq.model import LogId, MessageId
from metaq.protocol.commands import (
    Get,
    OffsetQuery,
    Put,
    Quit,
    Reply,
    Result,
    Stats,
    Value,
)
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.record.layout import HEADER
from metaq.testing.clock import ManualClock
from metaq.testing.fake_metaq import FakeMetaq, Known
from tests.cases import for_each
from tests.protocol.golden import Case, cases

ID = re.compile(rb"(result 200 )\d+( -?\d+\r\n)-\d{19}( \d+ -?\d+)")

DIFFERENT = {
    "put null transaction": "the text has the address of a Java object",
    "put null transaction 8 words": "the text has the address of a Java object",
    "two puts pipelined": "the recording has them in the other order",
    "put followed by junk crlf": "the recording lost the answer",
    "get offset 0 all": "two records in the other order; checked by lengths",
    "get two pipelined": "the recording has the answers in the other order",
    "get big right after put": "large puts can be read at once",
    "get big, 11 s later": "large puts can be read at once",
    "get max transfer cap": "the recording keeps its ends only",
}


def fake(clock: ManualClock | None = None) -> FakeMetaq:
    broker = FakeMetaq(
        {"test": 2, "meta-test": 2, "wild-*": 2},
        broker_id=0,
        clock=clock or ManualClock(),
        choose=lambda count: count - 1,
    )
    broker.uri = "meta://127.0.0.1:8123"
    broker.does_redirect = True
    return broker


def replies_to(
    broker: FakeMetaq, request: bytes, over: object = None
) -> tuple[bytes, bool]:
    """Return the answers, and whether the connection was closed.

    Args:
        over: the connection that it comes over.
    """
    connection = Connection(Role.SERVER, WireLimits())
    connection.receive_data(request)
    answer = b""
    try:
        while (command := connection.next_event()) is not NEED_DATA:
            if isinstance(command, Quit):
                return answer, True
            reply = broker.answer(cast("Known", command), over)
            answer += b"" if reply is None else encode(reply)
    except RemoteProtocolError:
        return answer, True
    return answer, False


def mask(raw: bytes) -> bytes:
    return ID.sub(rb"\1N\2ID\3", raw)


def without_ids(value: bytes, offset: int) -> bytes:
    """Blank the ids of the records of log test-0 in a slice that starts at `offset`."""
    line, _, body = value.partition(b"\r\n")
    blank = bytearray(body)
    start = 0
    for length in (5, 13, 3, 4, 15, 0, 5, 2, 7, 5, 5, 5, 2, 2, 2):
        for at in range(start + 8, start + 16):
            if offset <= at < offset + len(blank):
                blank[at - offset] = 0
        start += HEADER.size + length
    return line + b"\r\n" + bytes(blank)


GROUPS = {"put", "get", "offset", "transactions"}
ANOTHER = "another connection"


@cache
def answers() -> dict[str, tuple[bytes, bool]]:
    clock = ManualClock()
    broker, found = fake(clock), {}
    for case in cases():
        if case.group not in GROUPS:
            continue
        if case.name.endswith("after timeout"):
            clock.advance_s(2)
        if case.name == "put closed partition":
            broker.closed.add(LogId("test", 1))
        if case.name == "put reopened partition":
            broker.closed.clear()
        over = ANOTHER if case.name.endswith(ANOTHER) else None
        found[case.name] = replies_to(broker, case.request, over)
    return found


@for_each("case", [c for c in cases() if c.group in GROUPS])
def test_answers_are_those_of_the_java_broker(case: Case) -> None:
    """Same bytes behind the masks of the ids, same fate of the connection."""
    answer, is_closed = answers()[case.name]
    assert is_closed == case.is_closed
    if case.name in DIFFERENT:
        assert answer.startswith((b"result 200", b"result 500", b"value"))
        return
    assert case.response is not None
    if case.response.startswith(b"value"):
        offset = int(case.request.split(b" ")[4])
        theirs = without_ids(case.response, offset)
        assert without_ids(answer, offset) == theirs
    else:
        assert mask(answer) == mask(case.response)


def put(broker: FakeMetaq, payload: bytes, partition: int = 0) -> list[int]:
    reply = broker.answer(Put("test", partition, payload, 0, -1, 1))
    assert isinstance(reply, Result)
    assert reply.status == 200, reply
    return [int(word) for word in reply.text.split(" ")]


def ask(broker: FakeMetaq, command: Known) -> Reply:
    reply = broker.answer(command)
    assert reply is not None
    return reply


def test_ids_are_negative_and_grow() -> None:
    """As those of a broker that numbers by a clock since the machine's start."""
    broker = fake()
    ids = [put(broker, b"x")[0] for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert ids[-1] < 0
    assert len({MessageId(i) for i in ids}) == 5000


def test_a_put_to_any_partition_may_hit_a_closed_one() -> None:
    """MetaQ's own defect, which clients must live with."""
    broker = fake()
    broker.closed.add(LogId("test", 1))
    assert put(broker, b"x", partition=-1)[1] == 1


def test_a_slice_ends_with_its_segment_and_the_past_is_moved() -> None:
    """Row 5 and row 4, with offset queries between."""
    broker = fake()
    put(broker, b"one")
    broker.log("test", 0).roll()
    put(broker, b"two")
    first = ask(broker, Get("test", "g", 0, 0, 1024, 1))
    assert isinstance(first, Value)
    assert len(first.payload) == 23
    assert ask(broker, OffsetQuery("test", "g", 0, 30, 1)) == Result(200, b"23", 1)
    broker.log("test", 0).trim()
    assert ask(broker, Get("test", "g", 0, 22, 9, 1)) == Result(301, b"23", 1)
    broker.log("test", 0).trim()
    assert broker.log("test", 0).start == 23


def test_behind_the_end_is_an_error_or_the_end() -> None:
    """Rows 6 to 8: the setting decides, the largest offset is always the end."""
    broker = fake()
    put(broker, b"one")
    for does_redirect, status in ((True, 301), (False, 404)):
        broker.does_redirect = does_redirect
        far = ask(broker, Get("test", "g", 0, 24, 9, 1))
        at_end = ask(broker, Get("test", "g", 0, 23, 9, 1))
        tail = ask(broker, Get("test", "g", 0, 2**63 - 1, 9, 1))
        assert [r.status for r in (far, at_end, tail) if isinstance(r, Result)] == [
            status,
            404,
            301,
        ]


def test_what_a_refused_put_leaves_is_what_a_java_broker_leaves() -> None:
    """A wrong checksum makes the partition; a choice is told whatever the topic."""
    broker = fake()
    wrong = ask(broker, Put("test", 1, b"hello", 0, 1, 7))
    assert isinstance(wrong, Result)
    assert wrong.status == 500
    end = ask(broker, OffsetQuery("test", "g", 1, 0, 7))
    assert isinstance(end, Result)
    assert (end.status, end.text) == (200, "0")
    chosen = ask(broker, Put("nosuch", -1, b"hello", 0, -1, 7))
    assert isinstance(chosen, Result)
    assert "[partition 'nosuch-0']" in chosen.text


def test_stats_say_what_a_client_learns_from_them() -> None:
    """Broker id, configured partitions, and which logs there are."""
    broker = fake()
    put(broker, b"one", partition=1)

    def lines(item: str) -> list[str]:
        reply = ask(broker, Stats(item, 1))
        assert isinstance(reply, Result)
        return reply.text.split("\r\n")

    assert "broker_id 0" in lines("")
    assert lines("offsets")[1:-2] == ["test part 1 min_offset 0 max_offset 23"]
    assert "meta-test *Empty*" in lines("topics")
    assert lines("test")[1:3] == ["test", "resultCode 0"]
    config = parse_config(broker.config_text().encode(), "")
    assert config.topics["meta-test"].partition_count == 2
