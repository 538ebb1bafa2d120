"""Mailboxes: queues in memory for the replies to requests.

    requester --listen--> mailbox <--answer-- responder
        ^                    |
        +------ replies -----+      at most once: not kept after sending

A mailbox is opened by the first `listen` to it, and keeps replies until the next
`listen`. After KEPT_S without a listener it is closed; its replies are dropped and
counted. Nothing is written to disk, because a reply is useless without its requester.
The name is a secret shared by the requester and the responders that it asks.

    Invariant: a mailbox has a waiting listener, or a time at which it will be closed.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from metaq.config.settings import LimitsConfig
from metaq.errors import NotFoundError, ServerError, UnavailableError
from metaq.model import Offset
from metaq.protocol.commands import Answer, Listen
from metaq.protocol.encoding import encode_value_line
from metaq.record.runs import RecordRun, encode_runs
from metaq.stats import counter, gauge

KEPT_S: Final = 30.0
"""Time without a listener after which a mailbox is closed."""
MAILBOXES_MAX: Final = 100_000
REPLIES_MAX: Final = 1_000
"""Maximum number of replies in one mailbox."""
REPLY_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of the replies in one mailbox."""
WAITING_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of replies in all mailboxes without a listener, REPLY_OVERHEAD_BYTES
included for each. Replies sent to a listener count for its connection instead."""
REPLY_OVERHEAD_BYTES: Final = 256
"""Approximate memory of a reply in addition to its bytes."""


@dataclass(slots=True)
class MailboxStatistics:
    """Counters since the start, and the number of mailboxes. Snapshots are copies."""

    open_count: int = gauge("metaq_mailboxes", "Mailboxes that are open.")
    reply_count: int = counter(
        "metaq_mailbox_replies_total", "Replies that were put into a mailbox."
    )
    gone_count: int = counter(
        "metaq_mailbox_gone_total", "Replies whose requester had left."
    )
    dropped_count: int = counter(
        "metaq_mailbox_dropped_total",
        "Replies that no requester fetched before their mailbox was closed.",
    )
    refused_count: int = counter(
        "metaq_mailbox_refused_total",
        "Replies and mailboxes that were refused for lack of room.",
    )


class ListeningSession(Protocol):
    """Session interface used by mailboxes."""

    taker_count: int

    def hold(self, *, count: int, size_bytes: int) -> None:
        """Count commands as in flight until `answer`."""

    def answer(self, replies: bytes, *, count: int, size_bytes: int) -> None:
        """Send replies to `count` commands that held `size_bytes` in flight."""


@dataclass(slots=True, eq=False)
class _Listener:
    command: Listen
    session: ListeningSession
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class _Mailbox:
    replies: list[RecordRun] = field(default_factory=list)
    size_bytes: int = 0
    listener: _Listener | None = None
    closes_s: float = 0.0
    """Monotonic; of one without a listener."""

    @property
    def waiting_bytes(self) -> int:
        """Return the share of its replies in WAITING_BYTES_MAX."""
        return self.size_bytes + len(self.replies) * REPLY_OVERHEAD_BYTES


class Mailboxes:
    """The mailboxes of one broker. Used on the loop's thread."""

    def __init__(
        self,
        *,
        count_max: int = MAILBOXES_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Begin with none; `count_max` may be open at once."""
        self._count_max = count_max
        self._waiting_bytes_max = waiting_bytes_max
        self._waiting_bytes = 0
        self._open: dict[str, _Mailbox] = {}
        self._left: dict[str, _Mailbox] = {}
        """Those without a listener; the next one to be closed is first."""
        self._heard: dict[ListeningSession, set[str]] = {}
        """Mailboxes that a connection waits for."""
        self._counts = MailboxStatistics()

    def listen(
        self, command: Listen, session: ListeningSession, limits: LimitsConfig
    ) -> None:
        """Answer with what is in a mailbox, now or when there is something.

        Raises:
            UnavailableError: there are too many mailboxes.
        """
        name = command.mailbox
        mailbox = self._open.get(name)
        if mailbox is None:
            if len(self._open) >= self._count_max:
                self._counts.refused_count += 1
                raise UnavailableError(
                    f"mailbox: expected at most {self._count_max} of them, got one more"
                )
            mailbox = self._open[name] = _Mailbox()
        self._end_wait(name, mailbox)  # a newer connection takes its place
        self._left.pop(name, None)
        has_room = len(self._open) - len(self._left) <= limits.waiters_max
        wait_ms = min(command.wait_ms, limits.wait_ms_max) if has_room else 0
        timer = asyncio.get_running_loop().call_later(
            wait_ms / 1000, self._end_wait, name, mailbox
        )
        mailbox.listener = _Listener(command, session, timer)
        self._heard.setdefault(session, set()).add(name)
        session.hold(count=1, size_bytes=0)
        session.taker_count += 1
        if mailbox.replies or not wait_ms:
            self._end_wait(name, mailbox)

    def answer(self, command: Answer) -> bytes:
        """Put a reply into a mailbox; return the body of the 200.

        Raises:
            NotFoundError: the mailbox is not open, because the requester has left.
            ServerError: the reply is empty, or larger than a mailbox.
            UnavailableError: the mailbox is full, or the bound on all of them is
                reached.
        """
        name, size_bytes = command.mailbox, len(command.payload)
        mailbox = self._open.get(name)
        if mailbox is None:
            self._counts.gone_count += 1
            raise NotFoundError("mailbox: the requester has left")
        if not 1 <= size_bytes <= REPLY_BYTES_MAX:
            raise ServerError(
                f"mailbox: expected a reply of 1 to {REPLY_BYTES_MAX} bytes, got"
                f" {size_bytes}"
            )
        waiting_bytes = self._waiting_bytes + size_bytes + REPLY_OVERHEAD_BYTES
        size_bytes += mailbox.size_bytes
        if len(mailbox.replies) >= REPLIES_MAX or size_bytes > REPLY_BYTES_MAX:
            self._counts.refused_count += 1
            raise UnavailableError(
                f"mailbox: expected at most {REPLIES_MAX} replies of"
                f" {REPLY_BYTES_MAX} bytes, got {len(mailbox.replies) + 1} of"
                f" {size_bytes}"
            )
        if mailbox.listener is None and waiting_bytes > self._waiting_bytes_max:
            self._counts.refused_count += 1
            raise UnavailableError(
                f"mailboxes: expected at most {self._waiting_bytes_max} bytes that wait"
                f" for their requesters, got {waiting_bytes}"
            )
        self._waiting_bytes = waiting_bytes
        mailbox.size_bytes = size_bytes
        mailbox.replies.append(RecordRun(Offset(command.correlation), command.payload))
        self._counts.reply_count += 1
        if mailbox.listener is not None and len(mailbox.replies) == 1:
            # In the next turn, together with the replies that arrive until then.
            asyncio.get_running_loop().call_soon(self._end_wait, name, mailbox)
        return b""

    def drop(self, session: ListeningSession) -> None:
        """End the waits of a connection that ends; keep its mailboxes for KEPT_S."""
        for name in tuple(self._heard.get(session, ())):
            self._end_wait(name, self._open[name], is_lost=True)

    def close_left(self) -> None:
        """Close mailboxes without a listener for KEPT_S; called once a second."""
        now_s = asyncio.get_running_loop().time()
        while self._left:
            name, mailbox = next(iter(self._left.items()))
            if mailbox.closes_s > now_s:
                return
            self._counts.dropped_count += len(mailbox.replies)
            self._waiting_bytes -= mailbox.waiting_bytes
            del self._left[name], self._open[name]

    def statistics(self) -> MailboxStatistics:
        """Return a snapshot."""
        return replace(self._counts, open_count=len(self._open))

    def _end_wait(self, name: str, mailbox: _Mailbox, *, is_lost: bool = False) -> None:
        """Send the replies to the waiting listener, if any; the mailbox then has none.

        With `is_lost` its connection has ended, and the replies are kept.
        """
        listener = mailbox.listener
        if listener is None:
            return
        mailbox.listener = None
        listener.timer.cancel()
        session = listener.session
        session.taker_count -= 1
        self._heard[session].remove(name)
        if not self._heard[session]:
            del self._heard[session]
        mailbox.closes_s = asyncio.get_running_loop().time() + KEPT_S
        self._left[name] = mailbox
        payload = b""
        if not is_lost:
            payload = encode_runs(mailbox.replies)
            self._waiting_bytes -= mailbox.waiting_bytes
            mailbox.replies.clear()
            mailbox.size_bytes = 0
        line = encode_value_line(len(payload), listener.command.opaque)
        session.answer(line + payload, count=1, size_bytes=0)
