"""Roles, caps, the end of a talk, and the hand-over to a hot loop."""

from dataclasses import replace

import pytest

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import Follow, Mput, Put, Quit, Result, Value, Version
from metaq.protocol.connection import (
    NEED_DATA,
    PIECE_BYTES_MIN,
    Connection,
    InPieces,
    Oversized,
    ReceiveBuffer,
    Role,
    WireLimits,
)
from metaq.protocol.encoding import encode
from tests.rigs.pair import drain

SMALL = WireLimits(
    line_bytes_max=40,
    payload_bytes_max=10,
    batch_bytes_max=20,
    follow_bytes_max=25,
    reply_bytes_max=30,
)


def server(limits: WireLimits = SMALL) -> Connection:
    return Connection(Role.SERVER, limits)


def client(limits: WireLimits = SMALL) -> Connection:
    return Connection(Role.CLIENT, limits)


def put(payload: bytes, opaque: int = 1) -> bytes:
    return encode(Put("t", 0, payload, 0, -1, opaque))


@pytest.mark.parametrize(
    "raw",
    [b"result 200 5 1\r\nhello", b"value 5 1\r\nhello", b"value 2000000000 1\r\nhello"],
)
def test_a_server_swallows_replies(raw: bytes) -> None:
    """No request of its own waits for them; any length, no memory."""
    conn = server()
    conn.receive_data(raw)
    assert drain(conn) == []
    assert conn.buffer.unread_bytes == 0
    assert conn.is_between_frames == (b"2000000000" not in raw)


def test_a_swallowed_reply_leaves_the_stream_in_step() -> None:
    """The command after it is read, however the bytes are cut."""
    raw = b"result 200 5 1\r\nputs!" + b"version 7\r\n"
    for cut in range(len(raw)):
        conn = server()
        conn.receive_data(raw[:cut])
        events = drain(conn)
        conn.receive_data(raw[cut:])
        assert events + drain(conn) == [Version(7)]


@pytest.mark.parametrize(
    "raw",
    [b"result x 5 1\r\n", b"value 5\r\n", b"value 5 x\r\n", b"result 200 -1 1\r\n"],
)
def test_a_malformed_reply_breaks_a_server_too(raw: bytes) -> None:
    """Swallowing is no licence: the line must be sound."""
    conn = server()
    conn.receive_data(raw)
    with pytest.raises(RemoteProtocolError):
        drain(conn)


@pytest.mark.parametrize("raw", [b"version 1\r\n", b"quit\r\n", put(b"hello")])
def test_a_client_takes_a_command_as_a_breach(raw: bytes) -> None:
    """A broker never asks."""
    conn = client()
    conn.receive_data(raw)
    with pytest.raises(RemoteProtocolError, match="expected a reply, got a command"):
        drain(conn)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (put(b"x" * 11, 5), Oversized("put", 5, 11, 10)),
        (b"put t 0 2000000000 0 -1 5\r\n", Oversized("put", 5, 2_000_000_000, 10)),
        (b"sync t 0 11 0 1 6\r\n" + b"x" * 11, Oversized("sync", 6, 11, 10)),
        (b"mput t 0 21 1 -1 - -1 7\r\n" + b"x" * 21, Oversized("mput", 7, 21, 20)),
        (b"follow pull 26 8\r\n" + b"x" * 26, Oversized("follow", 8, 26, 25)),
    ],
)
def test_an_oversized_payload_is_announced_and_dropped(
    raw: bytes, expected: Oversized
) -> None:
    """The owner can answer at once; the payload costs no memory and no step."""
    conn = server()
    conn.receive_data(raw)
    assert drain(conn) == [expected]
    assert conn.buffer.unread_bytes == 0
    if expected.length < 100:
        conn.receive_data(b"version 1\r\n")
        assert drain(conn) == [Version(1)]
    else:
        assert not conn.is_between_frames


def test_an_oversized_payload_is_dropped_however_it_arrives() -> None:
    """Byte by byte, and the next command still is in step."""
    conn = server()
    events = []
    for byte in put(b"x" * 500, 5) + put(b"ok", 6):
        conn.receive_data(bytes([byte]))
        events += drain(conn)
        assert conn.buffer.unread_bytes <= 40
    assert events == [Oversized("put", 5, 500, 10), Put("t", 0, b"ok", 0, -1, 6)]


def test_payloads_at_their_cap_pass() -> None:
    """The cap itself is allowed, for each kind of payload."""
    conn = server()
    conn.receive_data(put(b"x" * 10) + encode(Mput("t", 0, 1, -1, 7, b"x" * 20)))
    conn.receive_data(encode(Follow("pull", b"x" * 25, 1)))
    assert [type(event) for event in drain(conn)] == [Put, Mput, Follow]
    other = client()
    other.receive_data(encode(Value(b"x" * 30, 1)) + encode(Result(200, b"x" * 30, 1)))
    assert [type(event) for event in drain(other)] == [Value, Result]


@pytest.mark.parametrize(
    "raw",
    [
        b"put t 0 2000000000 0 -1 x\r\n",
        b"put t 0 11\r\n",
        b"mput t 0 21 1 -1 - 5 7\r\n",
    ],
)
def test_an_oversized_command_must_be_sound(raw: bytes) -> None:
    """Without a readable opaque there is no request to answer: closed."""
    conn = server()
    conn.receive_data(raw)
    with pytest.raises(RemoteProtocolError):
        drain(conn)


@pytest.mark.parametrize("raw", [b"value 31 1\r\n", b"result 200 31 1\r\n"])
def test_an_oversized_reply_is_a_breach(raw: bytes) -> None:
    """A client asked for less; it does not collect what it cannot want."""
    conn = client()
    conn.receive_data(raw)
    with pytest.raises(RemoteProtocolError, match="at most 30 bytes, got 31"):
        drain(conn)


def test_a_line_at_the_cap_passes_and_one_byte_more_breaks() -> None:
    """The cap counts the line without its CRLF, also while the end is missing."""
    fits = b"v " + b"0" * 37 + b"7"
    for cut in (0, 1, 39, 40, 41):
        conn = server()
        conn.receive_data((fits + b"\r\n")[:cut])
        assert drain(conn) == []
        conn.receive_data((fits + b"\r\n")[cut:])
        assert drain(conn) == [Version(7)]
    for raw in (fits + b"x\r\n", fits + b"xx", b"x" * 100):
        conn = server()
        conn.receive_data(raw)
        with pytest.raises(RemoteProtocolError, match="longer than 40 bytes"):
            drain(conn)


def test_a_wrong_count_of_tokens_breaks_only_behind_the_payload() -> None:
    """MetaQ counts after it has read the payload; so the breach comes last."""
    conn = server()
    conn.receive_data(b"version 1\r\nput test 0 5 0\r\nhell")
    assert drain(conn) == [Version(1)]
    conn.receive_data(b"o")
    with pytest.raises(RemoteProtocolError, match="expected 6 to 8 tokens, got 5"):
        drain(conn)


def test_events_before_a_breach_come_first_and_the_breach_stays() -> None:
    """Earlier commands get their replies; nothing after the breach is read."""
    conn = server()
    conn.receive_data(b"version 1\r\nfoo\r\nversion 2\r\n")
    assert conn.next_event() == Version(1)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="unknown command: b'foo'"):
            conn.next_event()
    conn.receive_data(b"version 3\r\n")
    with pytest.raises(RemoteProtocolError, match="unknown command: b'foo'"):
        conn.next_event()
    assert conn.buffer.unread_bytes == 0
    assert not conn.is_between_frames


def test_nothing_is_read_behind_a_quit() -> None:
    """The server is about to close; pipelined commands are dropped."""
    conn = server()
    conn.receive_data(b"quit\r\nversion 1\r\n")
    assert drain(conn) == [Quit()]
    conn.receive_data(b"version 2\r\n")
    assert drain(conn) == []
    assert not conn.is_between_frames
    assert conn.buffer.unread_bytes == 0


def test_a_hot_loop_and_the_general_path_share_the_buffer() -> None:
    """A loop may consume whole frames; the rest goes on at exactly that byte."""
    conn = server()
    first, second = put(b"one", 1), put(b"two", 2)
    conn.receive_data(first + second + b"version 3\r\nput t 0 5 0 -1 4\r\nhe")
    assert conn.is_between_frames
    assert conn.buffer.data.startswith(first)
    conn.buffer.position += len(first)
    assert drain(conn) == [Put("t", 0, b"two", 0, -1, 2), Version(3)]
    assert not conn.is_between_frames
    assert conn.buffer.unread_bytes == 2
    conn.receive_data(b"llo" + first)
    assert not conn.is_between_frames
    assert conn.next_event() == Put("t", 0, b"hello", 0, -1, 4)
    assert conn.is_between_frames
    assert conn.buffer.data[conn.buffer.position :] == first


def test_a_hot_loop_may_pass_a_remembered_search() -> None:
    """A line end in front of the remembered place is still found afterwards."""
    conn = server()
    conn.receive_data(b"version 1\r\nversion 22222")
    assert drain(conn) == [Version(1)]
    conn.receive_data(b"2\r\nv 3\r\nv 4\r\n")
    conn.buffer.position += len(b"version 222222\r\n")
    assert drain(conn) == [Version(3), Version(4)]


def test_unread_lines_survive_feeding_without_asking() -> None:
    """Feeding twice before asking loses nothing, however much was consumed before."""
    conn = server()
    conn.receive_data(b"v 1\r\nv 2\r\nversion 3\r")
    assert conn.next_event() == Version(1)
    conn.receive_data(b"\nv 4\r\n")
    assert drain(conn) == [Version(2), Version(3), Version(4)]


def test_a_partial_line_does_not_hold_on_to_the_piece_it_came_in() -> None:
    """Ten bytes left over of a large piece cost ten bytes."""
    conn = server()
    conn.receive_data(b"version 1\r\n" * 1000 + b"version")
    drain(conn)
    assert conn.buffer.data == b"version"


def test_small_pieces_of_a_payload_are_merged() -> None:
    """A payload that comes byte by byte costs its bytes, not an object for each."""
    limits = WireLimits(payload_bytes_max=100_000)
    conn = server(limits)
    payload = bytes(range(256)) * 40
    raw = put(payload)
    conn.receive_data(raw[:25])
    assert conn.next_event() is NEED_DATA
    for position in range(25, 5000):
        conn.receive_data(raw[position : position + 1])
    large = raw[5000 : 5000 + PIECE_BYTES_MIN]
    conn.receive_data(large)
    conn.receive_data(raw[5000 + PIECE_BYTES_MIN :])
    assert len(conn.buffer._pieces) <= 3
    assert drain(conn) == [Put("t", 0, payload, 0, -1, 1)]


@pytest.mark.parametrize(
    "command", [Put("t", 0, b"", 0, -1, 1), Mput("t", 0, 1, 2, 3, b"")]
)
def test_a_large_payload_is_handed_out_as_it_came(command: Put | Mput) -> None:
    """Joining it would hold up the owner; what comes whole, or is small, is joined."""
    payload = bytes(range(256)) * 40
    raw = encode(replace(command, payload=payload))
    start = len(raw) - len(payload)
    conn = server(WireLimits(joined_bytes_max=len(payload) - 1))
    conn.receive_data(raw[: start + 5000])
    assert conn.next_event() is NEED_DATA
    conn.receive_data(raw[start + 5000 :] + raw)
    event, whole = drain(conn)
    assert event == InPieces(command, [payload[:5000], payload[5000:]], len(payload))
    assert whole == replace(command, payload=payload)
    small = server(WireLimits(joined_bytes_max=len(payload)))
    small.receive_data(raw[: start + 5000])
    assert small.next_event() is NEED_DATA
    small.receive_data(raw[start + 5000 :])
    assert drain(small) == [replace(command, payload=payload)]


def test_a_buffer_counts_what_it_holds() -> None:
    """Unread lines and collected payload; skipped bytes are not held."""
    buffer = ReceiveBuffer()
    buffer.append(b"abc\r\ndef")
    assert buffer.unread_bytes == 8
    assert buffer.take_line(9) == b"abc"
    assert buffer.take(5) is None
    assert buffer.take(5) is None
    assert (buffer.unread_bytes, buffer.missing_bytes) == (3, 2)
    buffer.append(b"ghijk")
    assert buffer.missing_bytes == 0
    assert buffer.take(5) == [b"defgh"]
    assert buffer.unread_bytes == 3
    buffer.skip(5)
    assert buffer.unread_bytes == 0
    buffer.append(b"lmn")
    assert buffer.unread_bytes == 1
    buffer.clear()
    assert buffer.unread_bytes == 0
