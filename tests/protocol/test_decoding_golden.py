"""The recorded requests decode to what the recorded answers belong to."""

from metaq.errors import RemoteProtocolError
from metaq.model import LocalTransactionId
from metaq.protocol.commands import (
    Command,
    Put,
    Quit,
    Stats,
    TransactionCommand,
    TransactionType,
    Version,
)
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from tests.cases import for_each
from tests.protocol.golden import Case, bytes_of, cases, vectors
from tests.rigs.pair import drain

LIMITS = WireLimits()


def hear(role: Role, raw: bytes) -> tuple[list, bool]:
    """Return the events in `raw` and whether the connection broke."""
    conn, events = Connection(role, LIMITS), []
    conn.receive_data(raw)
    try:
        while (event := conn.next_event()) is not NEED_DATA:
            events.append(event)
    except RemoteProtocolError:
        return events, True
    return events, False


def is_answered(event: Command) -> bool:
    is_end = isinstance(event, TransactionCommand) and event.type is TransactionType.END
    return not is_end and not isinstance(event, Quit)


@for_each("case", cases())
def test_requests_decode_as_the_java_broker_took_them(case: Case) -> None:
    """Closed where it closed; and one command for each opaque that was answered."""
    events, is_broken = hear(Role.SERVER, case.request)
    has_quit = any(isinstance(event, Quit) for event in events)
    assert (is_broken or has_quit) == case.is_closed
    if case.response is None:
        return
    replies, is_broken = hear(Role.CLIENT, case.response)
    assert not is_broken
    asked = {event.opaque for event in events if is_answered(event)}
    answered = {reply.opaque for reply in replies}
    if case.name == "put followed by junk crlf":
        # The put was stored; its answer was lost with the connection.
        assert (asked, answered) == ({34}, set())
    else:
        assert asked == answered


@for_each("case", cases())
def test_decoded_requests_encode_to_an_equal_meaning(case: Case) -> None:
    """A decoded value can be written, and reads back as the same value."""
    events, _ = hear(Role.SERVER, case.request)
    for event in events:
        assert hear(Role.SERVER, encode(event)) == ([event], False)


def test_named_cases_decode_to_what_the_table_says() -> None:
    """Spot checks of values, not only of outcomes."""
    by_name = {case.name: hear(Role.SERVER, case.request)[0] for case in cases()}
    assert by_name["v alone"] == [Version(2147483647)]
    assert by_name["put plain"] == [Put("test", 0, b"hello", 0, 907060870, 10)]
    assert by_name["put without checksum word"] == [Put("test", 0, b"old", 0, -1, 12)]
    assert by_name["put negative flag"][0].flag == -1
    assert by_name["two puts pipelined"] == [
        Put("test", 0, b"p1", 0, 1060662067, 32),
        Put("test", 0, b"p2", 0, 640760457, 33),
    ]
    assert by_name["put big 5242880"][0].payload == bytes(5242880)
    assert by_name["local put 7 words"][0].transaction == LocalTransactionId("s1", 1)
    assert by_name["local begin with timeout"][0].timeout_s == 1
    assert by_name["xa begin 2"][0].timeout_s == 30
    assert by_name["xa begin 2"][0].qualifier == "uq-1"
    assert by_name["xa key odd hex"][0].transaction.global_id == b"\xab"
    assert by_name["lf only"] == by_name["put then no body"] == []


def test_the_java_client_is_understood() -> None:
    """Every chunk that the real client sent decodes, and encodes to the same bytes."""
    heard = 0
    servers: dict[int, Connection] = {}
    for step in vectors()["java_client"]:
        for chunk in step["trace"]:
            if chunk["dir"] != ">":
                continue
            raw = bytes_of(chunk)
            assert raw is not None
            conn = servers.setdefault(chunk["conn"], Connection(Role.SERVER, LIMITS))
            conn.receive_data(raw)
            events = drain(conn)
            assert b"".join(map(encode, events)) == raw
            heard += len(events)
    assert heard > 80


def test_the_java_broker_is_understood() -> None:
    """Every chunk that the real broker sent its client decodes to a reply."""
    clients: dict[int, Connection] = {}
    heard = 0
    for step in vectors()["java_client"]:
        for chunk in step["trace"]:
            raw = bytes_of(chunk) if chunk["dir"] == "<" else None
            if raw is not None:
                conn = clients.setdefault(
                    chunk["conn"], Connection(Role.CLIENT, LIMITS)
                )
                conn.receive_data(raw)
                heard += len(drain(conn))
    assert heard > 80
    assert all(conn.is_between_frames for conn in clients.values())


def test_java_statistics_lines_are_blank_items() -> None:
    """`stats` with two spaces is what the client sends for everything."""
    items = [
        event.item
        for step in vectors()["java_client"]
        for chunk in step["trace"]
        if chunk["dir"] == ">" and bytes_of(chunk)
        for event in hear(Role.SERVER, bytes_of(chunk) or b"")[0]
        if isinstance(event, Stats)
    ]
    assert items[0] == ""
    assert "topics" in items
