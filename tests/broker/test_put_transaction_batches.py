"""A batch of a transaction is what its messages would be as single puts."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.broker.context import BrokerContext
from metaq.broker.handlers.put import JOURNAL_STEP_COUNT, handle_mput
from metaq.errors import ServerError
from metaq.model import MessageId, XaTransactionId
from metaq.protocol.commands import Mput
from metaq.protocol.encoding import encode, encode_puts
from metaq.protocol.transaction_ids import format_key, parse_key
from metaq.record.checksum import checksum, checksums
from metaq.record.ids import id_after
from metaq.record.layout import encode_record
from metaq.testing.clock import ManualClock
from tests.rigs.broker import Peer, running_broker

NOW_MS = 1_700_000_000_000
KEY = "XID:1:0a::uq"
XID = XaTransactionId(1, b"\x0a", b"", "uq")
OPAQUE = 7

Message = tuple[bytes, int]
"""Payload and flag."""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def records_of(messages: list[Message]) -> bytes:
    return b"".join(
        encode_record(data, id=MessageId(0), flag=flag) for data, flag in messages
    )


def mput(messages: list[Message], partition: int = 0, **fields: Any) -> bytes:
    records = records_of(messages)
    words = {
        "topic": "test",
        "partition": partition,
        "count": len(messages),
        "checksum": checksum(records),
        "opaque": OPAQUE,
        "payload": records,
        "transaction": XID,
    }
    return encode(Mput(**(words | fields)))


def puts(messages: list[Message], partition: int = 0) -> bytes:
    payloads = [data for data, _flag in messages]
    return b"".join(
        encode_puts(
            "test",
            partition,
            [data],
            flags=[flag],
            checksums=checksums([data]),
            opaques=range(OPAQUE, OPAQUE + 1),
            transaction=XID,
        )
        for data, flag in zip(payloads, [flag for _, flag in messages], strict=True)
    )


def command(words: bytes) -> bytes:
    return b"transaction %b s %b 1\r\n" % (KEY.encode(), words)


async def good(peer: Peer, data: bytes) -> bytes:
    answer = await peer.ask(data)
    assert answer.startswith(b"result 200 "), answer
    return answer.partition(b"\r\n")[2]


async def story(data: Path, frames: list[bytes]) -> list[object]:
    """Put frames in a transaction, prepare it, stop, start, and commit it.

    Returns the bytes of journal and logs, and counts.
    """
    clock = ManualClock(wall_ms=NOW_MS)
    found: list[object] = []
    async with running_broker(data, clock=clock) as broker, Peer(broker) as peer:
        await good(peer, command(b"BEGIN"))
        for frame in frames:
            await good(peer, frame)
        (view,) = broker.context.transactions.views()
        found += [view.put_count, view.size_bytes, view.partitions]
        found.append(broker.context.transactions.counters)
        found.append(broker.context.counters)
        found.append((data / "transactions" / "redo.1").read_bytes())
        assert await good(peer, command(b"PREPARE")) == b"0"
    async with running_broker(data, clock=clock) as broker, Peer(broker) as peer:
        await good(peer, command(b"COMMIT_TWO_PHASE"))
    for path in sorted(data.glob("*/*.meta")):
        found += [str(path.relative_to(data)), path.read_bytes()]
    return found


MESSAGES = st.lists(
    st.tuples(st.binary(max_size=30), st.sampled_from([0, 0, 1, -7])),
    min_size=1,
    max_size=20,
) | st.builds(
    lambda data, count: [(data, 0)] * count, st.binary(min_size=1), st.integers(12, 40)
)


@pytest.mark.slow
@settings(max_examples=25)
@given(batches=st.lists(st.tuples(MESSAGES, st.integers(0, 1)), min_size=1, max_size=4))
def test_a_batch_leaves_what_single_puts_leave(
    batches: list[tuple[list[Message], int]],
) -> None:
    """The same journal, byte for byte, the same logs behind a restart, and counts."""
    with TemporaryDirectory() as directory:
        batched = asyncio.run(
            story(Path(directory) / "batch", [mput(*each) for each in batches])
        )
        single = asyncio.run(
            story(Path(directory) / "single", [puts(*each) for each in batches])
        )
    assert batched == single


def test_the_reply_names_the_first_id(data_dir: Path) -> None:
    """It has no offset yet; the others follow from the first one."""

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            await good(peer, command(b"BEGIN"))
            reply = await good(peer, mput([(b"one", 0), (b"two", 0), (b"three", 0)], 1))
            first, partition, offset = map(int, reply.split())
            assert (partition, offset) == (1, -1)
            await good(peer, command(b"COMMIT_ONE_PHASE"))
            found = await peer.ask(b"get test g 1 0 1000 3\r\n")
            records = [
                encode_record(data, id=id_after(MessageId(first), k))
                for k, data in enumerate([b"one", b"two", b"three"])
            ]
            assert found == b"value %d 3\r\n%b" % (
                sum(map(len, records)),
                b"".join(records),
            )

    run(scenario())


GOOD = [(b"one", 0), (b"two", 0)]
WRONG = records_of(GOOD).replace(b"two", b"tow")
REFUSED = {
    "Invalid partition for transaction command:-1": mput(GOOD, -1),
    "failed.Detail:partition[0-1] has been closed": mput(GOOD, 1),
    "wrong partition 9": mput(GOOD, 9),
    "The server do not accept topic nosuch": mput(GOOD, topic="nosuch"),
    "XA transaction 'XID:9:::uq' has not been started.": mput(
        GOOD, transaction=parse_key("XID:9:::uq")
    ),
    "Local transaction 'null' has not been started.": mput(
        GOOD, transaction=parse_key("null")
    ),
    "Checksum failure,message may be corrupted": mput(GOOD, checksum=12345),
    "mput: at byte 23: record 1: expected checksum": mput(
        GOOD, payload=WRONG, checksum=checksum(WRONG)
    ),
    "expected 3 records, got 2": mput(GOOD, count=3),
    "mput: expected 1..4 records, got 5": mput([(b"", 0)] * 5),
    "payload of 51 bytes, expected at most 50": mput([(bytes(51), 0)]),
    "open transactions hold too much: expected at most 900 bytes, got": mput(
        [(bytes(50), 0)] * 4
    ),
}
BOUNDS = {"batchRecordsMax": "4", "payloadBytesMax": "50", "txBytesMax": "900"}


@pytest.mark.parametrize("text", REFUSED)
def test_a_batch_is_refused_as_a_whole(text: str, data_dir: Path) -> None:
    """With the words of a put or an mput; the transaction goes on without it."""

    async def scenario() -> None:
        async with running_broker(data_dir, BOUNDS) as broker, Peer(broker) as peer:
            broker.context.topics.close_partitions("test", start=1, end=1)
            await good(peer, command(b"BEGIN"))
            await good(peer, mput([(b"before", 0)]))
            journal = data_dir / "transactions" / "redo.1"
            before = journal.read_bytes()
            answer = (await peer.ask(REFUSED[text])).decode()
            assert text in answer, answer
            assert answer.startswith(("result 500 ", "result 403 "))
            assert journal.read_bytes() == before
            assert broker.context.transactions.counters.put_count == 1
            await good(peer, command(b"COMMIT_ONE_PHASE"))
            found = await peer.ask(b"get test g 0 0 1000 3\r\n")
            assert found.startswith(b"value 26 3\r\n")

    run(scenario())


class Asked:
    """A session that asks; what it is answered."""

    def __init__(self, context: BrokerContext) -> None:
        self.context = context
        self.replies = b""
        self.in_flight_bytes = 0

    def hold(self, *, count: int, size_bytes: int) -> None:
        pass

    def answer(
        self, replies: bytes, *, count: int, size_bytes: int, joins_next: bool = False
    ) -> None:
        self.replies += replies

    def run_out(self) -> None:
        raise AssertionError("there is memory")


def test_a_verdict_of_another_connection_comes_before_a_batch_that_is_looked_at(
    data_dir: Path,
) -> None:
    """A large batch goes in steps: one that is prepared meanwhile takes none of it."""
    count = JOURNAL_STEP_COUNT + 1
    records = records_of(GOOD[:1] * count)

    async def scenario() -> None:
        async with running_broker(data_dir) as broker, Peer(broker) as peer:
            batch = Mput("test", 0, count, -1, OPAQUE, records, transaction=XID)
            asked = Asked(broker.context)
            broker.context.transactions.begin(KEY, asked, 0)
            list(handle_mput(batch, [records], asked))
            steps = handle_mput(batch, [records], asked)
            next(steps)
            assert await good(peer, command(b"PREPARE")) == b"0"
            with pytest.raises(ServerError, match=f"'{KEY}' takes no puts: prepared"):
                list(steps)
            assert asked.replies.count(b"result 200 ") == 1
            (view,) = broker.context.transactions.views()
            assert (view.key, view.put_count) == (format_key(XID), count)

    run(scenario())
