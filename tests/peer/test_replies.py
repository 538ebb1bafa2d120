"""A client's reading of replies."""

import pytest

from metaq.errors import (
    BadReplyError,
    ForbiddenError,
    MetaqError,
    RemoteProtocolError,
    ServerError,
    UnexpectedReplyError,
)
from metaq.model import BrokerId, MessageId, Offset, TopicPartition
from metaq.peer.replies import (
    Damaged,
    Fetched,
    FetchedRuns,
    MovedTo,
    NothingThere,
    PutReceipt,
    damage_error,
    parse_boundaries,
    parse_check,
    parse_count,
    parse_get,
    parse_offset,
    parse_receipt,
    parse_stats,
    require_ok,
)
from metaq.protocol.commands import Reply, Result, Value
from metaq.protocol.texts import DAMAGED, with_code


def ok(body: str) -> Result:
    return Result(200, body.encode(), 1)


@pytest.mark.parametrize(
    ("body", "count"), [("0", 0), ("15", 15), ("9" * 19, 10**19 - 1)]
)
def test_a_count_is_one_number(body: str, count: int) -> None:
    """Zero is one, too."""
    assert parse_count(ok(body)) == count


@pytest.mark.parametrize("body", ["", " ", "-1", "1 2", "x", "٣", "1\n", "9" * 20])
def test_what_is_no_count_is_not_believed(body: str) -> None:
    """The error shows what came."""
    with pytest.raises(UnexpectedReplyError, match="expected a count, got"):
        parse_count(ok(body))


@pytest.mark.parametrize(
    ("body", "offsets"), [("7", (7,)), ("0 125 250", (0, 125, 250))]
)
def test_boundaries_are_growing_offsets(body: str, offsets: tuple[int, ...]) -> None:
    """An empty range has one."""
    assert parse_boundaries(ok(body)) == offsets


@pytest.mark.parametrize("body", ["", "1 1", "2 1", "1  2", "1 x", "-1 2", "1 2 "])
def test_what_does_not_grow_is_not_believed(body: str) -> None:
    """A plan that is made of it would read twice or never."""
    with pytest.raises(UnexpectedReplyError, match="expected growing offsets, got"):
        parse_boundaries(ok(body))


@pytest.mark.parametrize("parse", [parse_count, parse_boundaries])
def test_a_refusal_is_the_error_of_its_status(parse) -> None:
    """The text is the broker's; a value is no answer."""
    with pytest.raises(ServerError, match="no record"):
        parse(Result(500, b"no record starts there", 1))
    with pytest.raises(UnexpectedReplyError):
        parse(Value(b"1", 1))


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Value(b"x", 1), Fetched(b"x")),
        (Value(b"", 1), NothingThere()),
        (Result(404, b"Could not find message at position 5", 1), NothingThere()),
        (Result(301, b"100", 1), MovedTo(Offset(100))),
    ],
)
def test_answers_to_a_get(reply: Reply, outcome: object) -> None:
    """The answers that a reader goes on with are values."""
    assert parse_get(reply, Offset(0)) == outcome


def test_runs_come_to_a_get_with_a_filter_alone() -> None:
    """They say where to go on, which is further on; without a filter that is noise."""
    for payload in (b"runs", b""):
        reply = Value(payload, 1, 8)
        found = parse_get(reply, Offset(7), has_filter=True)
        assert found == FetchedRuns(payload, Offset(8))
        for next_offset in (0, 7):
            with pytest.raises(BadReplyError, match=f"after 7, got {next_offset}"):
                parse_get(Value(payload, 1, next_offset), Offset(7), has_filter=True)
    assert parse_get(Value(b"x", 1, 8), Offset(7)) == Fetched(b"x")
    assert parse_get(Value(b"x", 1), Offset(7), has_filter=True) == Fetched(b"x")


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Result(403, b"closed", 1), ForbiddenError, "closed"),
        (Result(500, b"", 1), ServerError, "status 500"),
        (Result(200, b"odd", 1), UnexpectedReplyError, "odd"),
        (Result(301, b"here", 1), UnexpectedReplyError, "here"),
        (Result(777, b"odd", 1), UnexpectedReplyError, "777"),
    ],
)
def test_refusals_of_a_get(reply: Reply, error: type[Exception], text: str) -> None:
    """Every other answer is an error that carries the broker's text."""
    with pytest.raises(error, match=text):
        parse_get(reply, Offset(0))


@pytest.mark.parametrize(
    "reply", [Result(200, b"1 2", 1), Result(200, b"a b c", 1), Value(b"", 1)]
)
def test_a_200_that_is_no_receipt_is_not_believed(reply: Reply) -> None:
    """A put counts as stored only with id, partition and offset."""
    with pytest.raises(BadReplyError):
        parse_receipt(reply)


@pytest.mark.parametrize("status", [403, 404, 500, 599])
def test_control_characters_of_a_refusal_are_escaped(status: int) -> None:
    """A broker can neither write lines into a log nor speak to a terminal."""
    body = "no\nERROR fake \x1b[31mline \x9b \u202e 拒绝".encode()
    with pytest.raises(MetaqError) as caught:
        require_ok(Result(status, body, 1))
    assert str(caught.value).endswith(r"no\nERROR fake \x1b[31mline \x9b \u202e 拒绝")


@pytest.mark.parametrize(
    "body",
    [
        "1 4 0",  # another partition
        "1 3 -1",
        f"1 3 {2**63}",
        f"{2**63} 3 0",
        "1 -3 0",
        "1 3 1_0",
        "1 3 +1",
        "1 3 \u0663",
        "1 3 0 ",
    ],
)
def test_a_receipt_of_another_partition_or_of_no_offset_breaks_the_rules(
    body: str,
) -> None:
    """The put went to partition 3; nothing of the receipt is used."""
    with pytest.raises(RemoteProtocolError, match="put: expected 'id 3 offset', got"):
        parse_receipt(ok(body), 3)


def test_a_receipt_names_the_partition_that_the_broker_chose() -> None:
    """Only a put that leaves the choice to the broker may lie anywhere."""
    assert parse_receipt(ok("-5 4 7")) == PutReceipt(MessageId(-5), 4, Offset(7))
    with pytest.raises(RemoteProtocolError):
        parse_receipt(ok(f"1 {2**31} 0"))


@pytest.mark.parametrize(
    "body", ["-1", str(2**63), "", "1 2", "1e3", "\u0663", "9" * 99]
)
def test_an_offset_that_cannot_be_breaks_the_rules(body: str) -> None:
    """Of an offset query, and of a get that is sent elsewhere."""
    with pytest.raises(RemoteProtocolError, match="expected an offset, got"):
        parse_offset(ok(body))
    with pytest.raises(RemoteProtocolError, match="expected an offset, got"):
        parse_get(Result(301, body.encode(), 1), Offset(0))


def test_boundaries_beyond_64_bits_break_the_rules() -> None:
    """They would be offsets."""
    with pytest.raises(RemoteProtocolError):
        parse_boundaries(ok(f"1 {2**63}"))


def refusal(start: object, end: object, **values: object) -> Result:
    code = with_code("no", DAMAGED, {"from": start, "to": end, **values})
    return Result(500, code.encode(), 1)


def test_damage_that_a_broker_names_is_a_value() -> None:
    """A file may have any name; the text for people means nothing."""
    reply = refusal(40, 60, file="/a b]/\x1b[0m", why="too short: 5, not 9")
    assert parse_get(reply, Offset(40)) == Damaged(
        Offset(40), Offset(60), r"/a b]/\x1b[0m", "too short: 5, not 9"
    )
    assert parse_get(refusal(40, 60), Offset(59)) == Damaged(
        Offset(40), Offset(60), None, "no"
    )


def test_damage_may_have_nothing_behind_it() -> None:
    """Then a reader stops, or waits; there is nowhere to go on."""
    found = parse_get(refusal(40, None), Offset(50))
    assert isinstance(found, Damaged)
    assert found.end is None
    error = damage_error(TopicPartition("test", BrokerId(0), 0), Offset(50), found)
    assert error.next_good_offset is None
    assert "nothing after it" in str(error)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (40, 40),
        (60, 40),
        (-1, 60),
        (0, 2**63),
        ("x", 60),
        (0, 50),
        (51, 60),
        (51, None),
    ],
)
def test_damage_that_cannot_be_breaks_the_rules(start: object, end: object) -> None:
    """Or that is somewhere else: the get was at 50."""
    with pytest.raises(RemoteProtocolError):
        parse_get(refusal(start, end), Offset(50))


def test_a_check_finds_bytes_good_or_damaged() -> None:
    """Good ones go up to an offset; damage covers what was asked about."""
    assert parse_check(ok("51"), Offset(50)) is None
    assert parse_check(refusal(40, 60), Offset(50)) == Damaged(
        Offset(40), Offset(60), None, "no"
    )
    with pytest.raises(ServerError, match="disk"):
        parse_check(Result(500, b"disk", 1), Offset(50))


@pytest.mark.parametrize(
    "reply", [ok("50"), ok(""), ok("51 52"), refusal(51, 60), Value(b"x", 1)]
)
def test_the_answer_to_a_check_that_cannot_be_is_refused(reply: Reply) -> None:
    """It was asked about the byte at 50."""
    with pytest.raises(UnexpectedReplyError):
        parse_check(reply, Offset(50))


def test_a_code_that_is_not_known_means_nothing() -> None:
    """A later broker may have others; the text is shown without it."""
    with pytest.raises(ServerError, match=r"^no$"):
        parse_get(Result(500, b"no [shiny a=1]", 1), Offset(0))


def test_lines_of_stats_without_a_value_have_an_empty_one() -> None:
    text = "STATS\r\npid 1\r\nalone\r\nname with blanks  kept \r\nEND\r\n"
    assert parse_stats(text) == {
        "pid": "1",
        "alone": "",
        "name": "with blanks  kept ",
    }


def test_lines_of_stats_of_one_kind_are_told_apart() -> None:
    """One partition, or one setting, of several would be left."""
    text = (
        "STATS\r\nt part 0 min_offset 0 max_offset 7\r\n"
        "t part 1 min_offset 0 max_offset 9\r\nset t:numPartitions=4\r\n"
        "set stat=a=b c\r\nset partitions 2 message_count 3\r\nEND\r\n"
    )
    assert parse_stats(text) == {
        "t part 0": "min_offset 0 max_offset 7",
        "t part 1": "min_offset 0 max_offset 9",
        "set t:numPartitions": "4",
        "set stat": "a=b c",
        "set": "partitions 2 message_count 3",
    }
