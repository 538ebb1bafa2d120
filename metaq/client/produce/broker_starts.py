"""When a MetaQ 1.4 broker was started, and whether it has recovered.

Such a broker opens its port, registers its topics one by one, and only then recovers:
it rolls back the unprepared transactions of its journal, including those that clients
began since the port opened. Later puts of such a transaction are committed, so half of
it is stored. Before recovery `RECOVER` lists nothing, and no xid is known. Nothing on
the wire or in ZooKeeper shows that recovery is complete. `stats` gives the uptime in
seconds and the number of topics; transactions wait for the longest time that
registration and recovery may take. MetaQ's own client connects once a topic is
registered, or seconds later if it was connected before, so it rarely comes so early.

A broker of ours opens its port after recovery.

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
"""Seconds allowed from a broker's start to the end of recovery, without registration.
It takes 30 ms with nothing to roll back, and one disk sync per open transaction."""
REGISTRATION_S: Final = 0.02
"""Seconds allowed to register one topic: six ZooKeeper operations, which take 4 ms on a
nearby server."""


@dataclass(frozen=True, slots=True)
class BrokerStart:
    """The start of the process at the other end of a connection."""

    at_ms: Millis
    """Wall clock time of this machine; exact to a second."""
    recovered_s: float
    """Monotonic time by which the process has recovered."""

    def is_after(self, promised_ms: Millis | None) -> bool:
        """Return whether it started after a prepare at this time; None: perhaps."""
        return promised_ms is None or self.at_ms > promised_ms


class BrokerStarts:
    """Start times of brokers, requested once per connection."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: WeakKeyDictionary[BrokerConnection, BrokerStart] = (
            WeakKeyDictionary()
        )

    def known(self, connection: BrokerConnection) -> BrokerStart | None:
        """Return the start found by `ask`; None for a broker of ours."""
        return self._known.get(connection)

    async def ask(
        self, connection: BrokerConnection, where: str, *, deadline_s: float
    ) -> float:
        """Return the seconds until the broker has recovered, 0 if it has.

        Raises:
            UnexpectedReplyError: its `stats` lack uptime or topics.
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
        # Clocks are read after the reply: a slow one makes the start later, never
        # earlier.
        started_s = self._clock.monotonic_s() - up_s
        at_ms = Millis(self._clock.wall_ms() - up_s * 1000)
        limit_s = RECOVERY_S + REGISTRATION_S * topic_count
        return BrokerStart(at_ms, started_s + limit_s)
