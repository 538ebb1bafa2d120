"""A broker with an exchange, over logs and a journal that a test moves step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final

from metaq.broker.dispatch import dispatch, dispatch_in_steps
from metaq.broker.exchanges import Exchanges
from metaq.errors import MetaqError
from metaq.model import LogId, MessageId, Position
from metaq.protocol.commands import OWN_TIMES, Mput, Put, Result
from metaq.protocol.connection import InPieces
from metaq.protocol.transaction_ids import parse_key
from metaq.record.checksum import checksum
from metaq.record.flags import Headers, encode_payload
from metaq.record.layout import Record, encode_record
from metaq.record.scan import read_record
from metaq.routing.match import Binding, ExchangeKind
from metaq.testing.clock import ManualClock
from metaq.txn.figures import TransactionLimits
from metaq.zk.exchange_definitions import (
    ExchangeDefinition,
    binding_name,
)
from tests.broker.delay_rig import FakeSession, result_of
from tests.broker.stepped import context_on
from tests.rigs.disk import Choose
from tests.rigs.fs import FaultyFileSystem, keep_none
from tests.txn.support import TOPIC, TransactionBench, content

EXCHANGE: Final = "events"
TOPICS: Final = {"t0": 1, "t1": 2, "t2": 3, "other": 1}
"""Topics and their partitions."""

_KEYS: Final = count(1)
"""Numbers of transactions, of all lives."""

Data = tuple[str, bytes] | tuple[str, bytes, str]
"""Routing key and data, and perhaps a message key."""


def exchange_of(
    *bindings: Binding, kind: ExchangeKind = ExchangeKind.TOPIC, **more: Any
) -> ExchangeDefinition:
    named = {binding_name(each): each for each in bindings}
    return ExchangeDefinition(kind=kind, bindings=named, **more)


def batch_of(
    *messages: Data, headers: Headers = (), times: Sequence[int] = (), **more: Any
) -> Mput:
    """Return a batch for the exchange; with times each message has its own."""
    records, ids = [], times or [0] * len(messages)
    more |= {"deliver_ms": OWN_TIMES} if times else {}
    for (routing_key, data, *key), number in zip(messages, ids, strict=True):
        pairs = (("routing-key", routing_key.encode()), *headers)
        payload, flag = encode_payload(data, None, key[0] if key else None, pairs)
        records.append(encode_record(payload, id=MessageId(number), flag=flag))
    body = b"".join(records)
    fields = {"topic": EXCHANGE, "partition": 0, "opaque": 1, **more}
    return Mput(count=len(messages), checksum=checksum(body), payload=body, **fields)


class RouteRig:
    """One life of a broker, on a disk in memory."""

    def __init__(
        self,
        *bindings: Binding,
        fs: FaultyFileSystem | None = None,
        clock: ManualClock | None = None,
        topics: Mapping[str, int] = TOPICS,
        limits: TransactionLimits | None = None,
        **more: Any,
    ) -> None:
        self.fs = fs = fs or FaultyFileSystem()
        self.clock = clock = clock or ManualClock()
        self.bench = TransactionBench(fs, clock=clock, limits=limits)
        defined = {
            name: replace(TOPIC, name=name, partition_count=partitions)
            for name, partitions in topics.items()
        }
        config = replace(self.bench.logs.config, defined=defined)
        self.bench.topics.apply(config)
        self.bench.open()
        self.context = context_on(self.bench, config)
        self.changes: list[None] = []
        """One for each time that exchanges came or went."""
        self.exchanges = Exchanges(self.bench.topics, lambda: self.changes.append(None))
        self._topics = topics
        self.bind(*bindings, **more)

    def bind(self, *bindings: Binding, **more: Any) -> None:
        """Have the exchange with these bindings, and no others."""
        exchange = exchange_of(*bindings, **more)
        self.exchanges.apply({EXCHANGE: exchange}, self._topics.keys())

    def begin(self, command: Mput, session: FakeSession | None = None) -> FakeSession:
        """Put, and do not wait for the disk; the session has the reply when it came."""
        return self._carry_out(command, session or FakeSession(self.context))

    def _carry_out(self, command: Mput, session: FakeSession) -> FakeSession:
        whole = InPieces(command, [command.payload], len(command.payload))
        steps = dispatch_in_steps(whole, session)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            if end.value:
                session.replies.append(end.value)
        return session

    def send(self, command: Mput) -> Result:
        """Put, and wait for the answer."""
        session = self.begin(command)
        self.bench.run()
        (reply,) = session.replies
        return result_of(reply)

    def put(self, command: Put) -> Result:
        """Put a single message, and wait for the answer."""
        session = FakeSession(self.context)
        refused = dispatch(command, session)
        self.bench.run()
        return result_of(refused or session.replies[0])

    def commit(self, *commands: Mput, is_committed: bool = True) -> bool:
        """Put batches in a transaction; return whether it was committed."""
        key, transactions = f"TX:s:{next(_KEYS)}", self.bench.coordinator
        outcomes = list[MetaqError | None]()
        owner = FakeSession(self.context)
        try:
            transactions.begin(key, owner, 0)
        except MetaqError:  # its journal is offline
            return False
        for command in commands:
            inside = replace(command, transaction=parse_key(key))
            self._carry_out(inside, owner)
        self.bench.run()
        is_taken = all(each.startswith(b"result 200") for each in owner.replies)
        if is_committed and is_taken:
            transactions.commit(key, owner, outcomes.append, is_two_phase=False)
        else:
            transactions.rollback(key, owner, outcomes.append)
        self.bench.run()
        return is_committed and is_taken and outcomes == [None]

    def payloads(self, topic: str, partition: int = 0) -> list[bytes]:
        """Return the data that readers of a partition see."""
        found: Sequence[bytes] = self.bench.payloads(LogId(topic, partition))
        return [each[each.index(b"|") :] for each in found]

    def ids(self, topic: str, partition: int = 0) -> list[int]:
        """Return the ids of their records."""
        log_id, at, found = LogId(topic, partition), Position(0), list[int]()
        if log_id in self.bench.logs.manager.logs():
            data = content(self.bench, log_id)
            while isinstance(record := read_record(data, at), Record):
                found.append(record.id)
                at = Position(at + record.size_bytes)
        return found

    def place_of(self, data: bytes, topic: str) -> LogId:
        """Return the partition of a topic that has a message."""
        places = range(self._topics[topic])
        return LogId(topic, next(p for p in places if data in self.payloads(topic, p)))

    def again(self, choose: Choose = keep_none) -> "RouteRig":
        """Cut the power, and return the next life, without bindings."""
        self.bench.kill()
        return RouteRig(fs=self.fs.crash(choose), clock=self.clock, topics=self._topics)
