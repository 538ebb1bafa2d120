"""Connections of a fake broker: answers come late, in pieces, out of order, or not."""

from collections.abc import Iterator

import pytest

from metaq.protocol.commands import Get, Put, Value, Version
from metaq.testing.fake_broker import FakeBroker
from metaq.testing.fake_metaq import VERSION
from tests.rigs.waiting import wait_until
from tests.testing.sockets import Wire


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker({"test": 2}) as fake:
        yield fake


def put(opaque: int = 1, payload: bytes = b"hello") -> Put:
    return Put("test", 0, payload, 0, -1, opaque)


@pytest.mark.parametrize(
    "line", [b"mput test 0 500 3 -1 - -1 9\r\n", b"hello\r\n", b"put test\r\n", b"\r\n"]
)
def test_unknown_words_close_behind_the_answers_that_are_owed(
    broker: FakeBroker, line: bytes
) -> None:
    """The line is enough: no payload is waited for."""
    broker.delay_s = 0.01
    with Wire(broker.address) as wire:
        wire.send(Version(5))
        wire.socket.sendall(line)
        assert wire.reply().opaque == 5
        assert wire.is_ended()
    assert broker.statistics().unknown_count == 1


def test_quit_closes(broker: FakeBroker) -> None:
    """Without an answer, and without being counted as unknown."""
    with Wire(broker.address) as wire:
        wire.socket.sendall(b"quit\r\n")
        assert wire.is_ended()
    assert broker.statistics().unknown_count == 0


def test_reordered_answers_are_all_there_and_not_in_order(broker: FakeBroker) -> None:
    """Each command is answered once, under its opaque."""
    broker.reorder = True
    with Wire(broker.address) as wire:
        wire.send(*[put(n, b"%d" % n) for n in range(20)])
        opaques = [wire.reply().opaque for _ in range(20)]
    assert opaques != sorted(opaques)
    assert sorted(opaques) == list(range(20))
    assert broker.payloads() == [b"%d" % n for n in range(20)]


def test_puts_that_arrive_together_are_stored_in_another_order(
    broker: FakeBroker,
) -> None:
    """Once each; what the answers say of each is true."""
    broker.misorders_puts = True
    with Wire(broker.address) as wire:
        wire.send(*[put(n, b"%d" % n) for n in range(8)])
        replies = [wire.reply() for _ in range(8)]
    assert sorted(broker.payloads()) == [b"%d" % n for n in range(8)]
    assert [reply.opaque for reply in replies] != list(range(8))
    assert broker.payloads() == [b"%d" % reply.opaque for reply in replies]


@pytest.mark.slow
def test_answers_come_in_pieces(broker: FakeBroker) -> None:
    """The bytes are the same, whatever the pieces."""
    broker.add(b"x" * 1000)
    broker.split_bytes = 1
    with Wire(broker.address) as wire:

        def is_in_pieces() -> bool:
            wire.send(Get("test", "g", 0, 0, 1 << 20, 1), Version(2))
            value = wire.reply()
            assert isinstance(value, Value)
            assert value.payload[20:] == b"x" * 1000
            assert wire.reply().opaque == 2
            return 1 in map(len, wire.pieces)

        # A reader that the machine wakes late finds them merged by the kernel.
        wait_until(is_in_pieces)


def test_pieces_may_end_anywhere(broker: FakeBroker) -> None:
    """Within an answer and after it; nothing is lost between them."""
    broker.splits_anywhere = True
    with Wire(broker.address) as wire:

        def does_one_end_within_an_answer() -> bool:
            wire.send(*[Version(n) for n in range(100)])
            assert [wire.reply().opaque for _ in range(100)] == list(range(100))
            return not all(piece.endswith(VERSION.encode()) for piece in wire.pieces)

        # A reader that the machine wakes late finds them merged by the kernel.
        wait_until(does_one_end_within_an_answer)


def test_answers_come_late_while_commands_are_read(broker: FakeBroker) -> None:
    """Every command is carried out long before the first answer leaves."""
    broker.delay_s = 60.0
    with Wire(broker.address) as wire:
        wire.send(*[put(n) for n in range(3)])
        wait_until(lambda: broker.statistics().commands["put"] == 3)
        assert len(broker.payloads()) == 3
        broker.delay_s = 0.0
        assert wire.ask(Version(9)).opaque == 9
