"""When a MetaQ 1.4 broker was started, and whether it has recovered.

It opens its port, registers its topics one by one, and only then rolls back the
unprepared transactions of its journal, including those that clients began since the
port opened. Later puts of such a transaction are committed, so half of it is stored.
Until then `RECOVER` lists nothing, and no xid is known. Nothing on the wire or in
ZooKeeper says that the recovery is done. `stats` says for how many seconds the process
has been up, and how many topics it registers: transactions wait for as long as both may
take. MetaQ's own client connects when a topic is registered, seconds later where it was
connected before, so it is hardly ever that fast.

A broker of ours opens its port when it has recovered.

Source: docs/metaq-1.4/broker.md 5.7, 7.1 and 10.1.
"""

from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from metaq.clock import Clock
from metaq.errors import UnexpectedReplyError
from metaq.model import Millis
from metaq.peer.connection import BrokerConnection
from metaq.peer.replies import require_ok
from metaq.protocol.commands import Stats

RECOVERY_S: Final = 5.0
"""Seconds after its start in which a broker has recovered, registration apart. It takes
30 ms with nothing to roll back, and a sync of its disk for each open transaction."""
REGISTRATION_S: Final = 0.02
"""Seconds for the registration of one topic: six operations of ZooKeeper, which take
4 ms where it is near."""


@dataclass(frozen=True, slots=True)
class BrokerStart:
    """The start of the process at the other end of a connection."""

    at_ms: Millis
    """Wall clock of this machine, to the second."""
    recovered_s: float
    """Monotonic time from which on it has recovered."""

    def is_after(self, promised_ms: Millis | None) -> bool:
        """Return whether it had to recover promises of that time; None: perhaps."""
        return promised_ms is None or self.at_ms > promised_ms


class BrokerStarts:
    """The starts of brokers, asked for once per connection."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: WeakKeyDictionary[BrokerConnection, BrokerStart] = (
            WeakKeyDictionary()
        )

    def known(self, connection: BrokerConnection) -> BrokerStart | None:
        """Return the start that `ask` found; None of a broker of ours."""
        return self._known.get(connection)

    async def ask(
        self, connection: BrokerConnection, where: str, *, deadline_s: float
    ) -> float:
        """Return the seconds until the broker has recovered, 0 if it has.

        Raises:
            UnexpectedReplyError: it does not say how long it has been up.
            MetaqError: as `BrokerConnection.call`, or the broker refuses.
        """
        if connection.capabilities.has_mput:
            return 0.0
        start = self._known.get(connection)
        if start is None:
            start = await self._read(connection, where, deadline_s)
            self._known[connection] = start
        return max(0.0, start.recovered_s - self._clock.monotonic_s())

    async def _read(
        self, connection: BrokerConnection, where: str, deadline_s: float
    ) -> BrokerStart:
        command = Stats("", connection.next_opaque())
        reply = await connection.call(command, deadline_s=deadline_s)
        lines = require_ok(reply).text.splitlines()
        found = dict(line.split(" ", 1) for line in lines if " " in line)
        try:
            up_s, topic_count = int(found["uptime"]), int(found["topics"])
        except (KeyError, ValueError):
            raise UnexpectedReplyError(
                f"{where}: expected uptime and topics in stats, got {found!r:.80}"
            ) from None
        # Read after the answer: a slow one makes the start later, never earlier.
        started_s = self._clock.monotonic_s() - up_s
        at_ms = Millis(self._clock.wall_ms() - up_s * 1000)
        limit_s = RECOVERY_S + REGISTRATION_S * topic_count
        return BrokerStart(at_ms, started_s + limit_s)
