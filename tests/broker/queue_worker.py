"""A worker of a queue group, byte for byte, against a broker in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from metaq.broker.app import Broker
from metaq.broker.queue_part import ServedQueue
from metaq.fs import FileSystem
from metaq.protocol.commands import Put, Result, Settle, Take, Value
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from metaq.protocol.encoding import encode
from metaq.protocol.queue_frames import (
    Settlement,
    SettleVerb,
    Word,
    decode_taken,
    decode_words,
    encode_settlements,
)
from metaq.protocol.transaction_ids import parse_key
from metaq.record.flags import Headers, decode_payload, encode_payload
from metaq.record.layout import Record
from metaq.record.runs import decode_runs, records_of
from metaq.record.scan import read_record
from metaq.zk.group_definitions import QueueGroupDefinition
from tests.rigs.broker import Peer, running_broker

GROUP = "workers"
TOPIC = "test"


def define(broker: Broker, group: str = GROUP, **settings: Any) -> None:
    """Put one queue group in effect, as a definition in ZooKeeper would."""
    wanted = {"topic": TOPIC, "dead_letter_topic": None, **settings}
    queues = broker.context.queues
    assert queues is not None
    queues.apply_groups({group: QueueGroupDefinition(**wanted)})


@dataclass(frozen=True)
class Got:
    """A message that was taken."""

    partition: int
    offset: int
    delivery: int
    deliveries: int
    data: bytes

    def says(self, verb: SettleVerb, argument: int = 0, text: str = "") -> Settlement:
        return Settlement(self.offset, self.delivery, verb, argument, text)


class Worker:
    """One worker with one connection at a time."""

    def __init__(
        self,
        peer: Peer,
        name: str = "w1",
        group: str = GROUP,
        generation: int | None = None,
    ) -> None:
        self.peer = peer
        self.generation = generation
        self.name = name
        self.group = group
        self._opaques = count(1)
        self._connection = Connection(Role.CLIENT, WireLimits())

    async def take(self, count: int = 1, partition: int = -1, **more: Any) -> list[Got]:
        reply = await self.ask(self.taking(count, partition, **more))
        assert isinstance(reply, Value), reply
        return got_of(reply)

    def taking(self, count: int = 1, partition: int = -1, **more: Any) -> Take:
        return Take(
            TOPIC,
            self.group,
            partition,
            count,
            more.pop("size", 1 << 20),
            next(self._opaques),
            self.name,
            generation=self.generation,
            **more,
        )

    async def settle(
        self, partition: int, entries: Sequence[Settlement], tx: str = ""
    ) -> list[Word]:
        reply = await self.ask(self.settling(partition, entries, tx))
        assert isinstance(reply, Result), reply
        assert reply.status == 200, reply
        return decode_words(reply.text, len(entries))

    def settling(
        self, partition: int, entries: Sequence[Settlement], tx: str = ""
    ) -> Settle:
        return Settle(
            TOPIC,
            self.group,
            partition,
            len(entries),
            encode_settlements(entries),
            next(self._opaques),
            self.name,
            parse_key(tx) if tx else None,
            self.generation,
        )

    async def say(
        self, got: Got, verb: SettleVerb, argument: int = 0, text: str = ""
    ) -> Word:
        (word,) = await self.settle(got.partition, [got.says(verb, argument, text)])
        return word

    async def ack(self, got: Got, tx: str = "") -> Word:
        entries = [got.says(SettleVerb.ACK)]
        return (await self.settle(got.partition, entries, tx))[0]

    async def ask(self, command: Take | Settle) -> Result | Value:
        self._connection.receive_data(await self.peer.ask(encode(command)))
        reply = self._connection.next_event()
        assert isinstance(reply, Result | Value), reply
        assert reply.opaque == command.opaque
        assert self._connection.next_event() is NEED_DATA
        return reply


def got_of(reply: Value) -> list[Got]:
    taken = decode_taken(reply.payload)
    records = {
        each.offset: each.data
        for run in decode_runs(reply.payload, taken.records_at)
        for each in records_of(run)
    }
    assert sorted(records) == sorted(each.offset for each in taken.deliveries)
    return [
        Got(taken.partition, *each, data_of(records[each.offset]))
        for each in taken.deliveries
    ]


def data_of(raw: bytes) -> bytes:
    record = read_record(raw)
    assert isinstance(record, Record), record
    return decode_payload(record.payload, record.flag).data


async def put(
    peer: Peer,
    *data: bytes,
    partition: int = 0,
    key: str | None = None,
    headers: Headers = (),
) -> None:
    """Put messages, each acknowledged."""
    for each in data:
        payload, flag = encode_payload(each, key=key, headers=headers)
        reply = await peer.ask(encode(Put(TOPIC, partition, payload, flag, -1, 1)))
        assert reply.startswith(b"result 200"), reply


async def stored(broker: Broker, topic: str, partition: int = 0) -> list[Record]:
    """Return the records of a partition."""
    log = broker.context.topics.find_log(topic, partition)
    if log is None:
        return []
    found, offset = [], log.log_start_offset
    while offset < log.high_watermark:
        part = log.read(offset, 1 << 20)
        data = await asyncio.to_thread(part.read)
        part.release()
        position = 0
        while position < len(data):
            record = read_record(data, position)
            assert isinstance(record, Record), record
            found.append(record)
            position += record.size_bytes
        offset += position
    return found


Scenario: TypeAlias = Callable[[Broker, Peer], Awaitable[None]]


QUICK = {"queueReclaimMs": "100"}


def run(
    data: Path,
    scenario: Scenario,
    *,
    broker: Mapping[str, str] | None = None,
    fs: FileSystem | None = None,
    **settings: Any,
) -> None:
    """Play a scenario with one queue group; `broker` has settings of the broker."""

    async def main() -> None:
        wanted = {**QUICK, **(broker or {})}
        async with running_broker(data, wanted, fs=fs) as running, Peer(running) as one:
            define(running, **settings)
            await scenario(running, one)

    asyncio.run(main())


def queue_of(broker: Broker, partition: int = 0) -> ServedQueue:
    """Return the queue of a partition as the broker has it in memory."""
    queues: Any = broker.context.queues
    return queues.queue_for(queues.find_group(_ANY_TAKE), partition)


_ANY_TAKE = Take(TOPIC, GROUP, -1, 1, 1, 1, "w1")
