"""Messages that no broker accepts: refused at once, or kept whole, within a bound."""

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client.errors import MessageTooLargeError
from metaq.client.produce.dead_letter_files import DeadLetterFiles, encode_refused
from metaq.client.produce.ordered_producer import Spooled
from metaq.client.session import AsyncClient
from metaq.errors import NoSpaceError
from metaq.model import BrokerId, Message, MessageId, Millis, Offset, TopicPartition
from tests.brokers import PYTHON, AnyBroker, broker_of
from tests.rigs.fs import FaultyFileSystem
from tests.rigs.waiting import until

PLACE = TopicPartition("test", BrokerId(3), 1)
ERROR = MessageTooLargeError("message: too large")
SPOOL = Path("/spool")
SHORT_S = 0.1
"""Longest time of a send, where it is bound to fail."""

ONE_BROKER = {"limited": "MetaQ 1.4 has no limit"}


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[AnyBroker]:
    settings = {"payloadBytesMax": "100"}
    with broker_of(PYTHON, tmp_path / "limited", settings=settings) as broker:
        yield broker


def message_of(data: bytes, attribute: str | None = None) -> Message:
    nowhere = Offset(-1)
    return Message("test", data, attribute, MessageId(-1), PLACE, nowhere, nowhere)


@given(
    st.binary() | st.text().map(str.encode),
    st.none() | st.text(st.characters(exclude_categories=[])),
)
def test_a_file_says_everything(data: bytes, attribute: str | None) -> None:
    text = encode_refused(message_of(data, attribute), ERROR, Millis(17))
    fields = json.loads(text)
    assert (text.count(b"\n"), text[-1:]) == (1, b"\n")
    coded = fields.pop("data_base64")
    found = fields.pop("data")
    assert (found is None) != (coded is None)
    assert (base64.b64decode(coded) if found is None else found.encode()) == data
    assert fields == {
        "topic": "test",
        "broker": 3,
        "partition": 1,
        "attribute": attribute,
        "error": "message: too large",
        "at_ms": 17,
    }


def test_files_are_bounded_until_they_are_taken_away() -> None:
    fs = FaultyFileSystem()
    fs.make_directory(SPOOL)
    kept = DeadLetterFiles(fs, SPOOL, 2)
    kept.recount()
    first = kept.keep(message_of(b"a"), 1, ERROR, Millis(5))
    second = kept.keep(message_of(b"b"), 1, ERROR, Millis(6))
    with pytest.raises(NoSpaceError, match="2 refused messages are in /spool/refused"):
        kept.keep(message_of(b"c"), 2, ERROR, Millis(6))
    disk = fs.crash()
    after = DeadLetterFiles(disk, SPOOL, 2)
    after.recount()
    assert after.count == 2
    assert first != second
    disk.unlink(first)
    after.keep(message_of(b"c"), 2, ERROR, Millis(6))
    assert after.count == 2


@pytest.mark.slow
def test_what_turns_out_to_be_too_large_holds_nobody_up(
    limited: AnyBroker, tmp_path: Path
) -> None:
    """Spooled before the limit was known: set aside and reported; the next is sent."""
    broker = limited
    large = b"\xff" * 101

    async def scenario() -> None:
        await asyncio.to_thread(broker.stop)
        async with AsyncClient(**broker.client_options) as client:
            async with client.ordered_producer("test", "0:1", tmp_path) as producer:
                for data in (b"0", large, b"1"):
                    sent = await producer.send(data, attribute="k", timeout=SHORT_S)
                    assert isinstance(sent, Spooled)
                await asyncio.to_thread(broker.start)
                await until(lambda: not producer.statistics().waiting)
                found = producer.statistics()
                assert (found.replayed_count, found.refused_count) == (2, 1)
                assert "1 spooled messages" in found.problems[0]
            async with client.ordered_producer("test", "0:1", tmp_path) as producer:
                found = producer.statistics()
                assert found.refused_count == 0
                assert str(tmp_path) in found.problems[0]

    asyncio.run(scenario())
    assert broker.stored() == [b"0", b"1"]
    (file,) = tmp_path.glob("*/refused/*.json")
    fields = json.loads(file.read_text())
    assert base64.b64decode(fields["data_base64"]) == large
    assert (fields["data"], fields["attribute"]) == (None, "k")
    assert "at most 100 bytes, got " in fields["error"]


@pytest.mark.slow
def test_what_can_never_be_sent_is_not_spooled(
    limited: AnyBroker, tmp_path: Path
) -> None:
    """The broker's last known limit counts while it is away, and so does the buffer."""
    broker = limited

    async def scenario() -> None:
        async with (
            AsyncClient(**broker.client_options) as client,
            client.ordered_producer(
                "test", "0:1", tmp_path, timeout_s=SHORT_S, buffer_bytes_max=50
            ) as small,
            client.ordered_producer(
                "test", "0:1", tmp_path / "other", timeout_s=SHORT_S
            ) as producer,
        ):
            await producer.send(b"0", timeout=5)
            await asyncio.to_thread(broker.stop)
            with pytest.raises(MessageTooLargeError, match=r"at most 100 .* got 101"):
                await producer.send(bytes(101))
            with pytest.raises(MessageTooLargeError, match="the buffer takes"):
                await small.send(bytes(51))
            assert isinstance(await producer.send(bytes(100)), Spooled)
            assert sum(producer.statistics().waiting.values()) == 1

    asyncio.run(scenario())
