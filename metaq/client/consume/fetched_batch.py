"""A fetched batch: messages of one partition, on their way through a worker's hands.

Theory of operation. A batch hands its messages out in order: one by one to a loop
(`begin`), or several at once (`take`). It counts them as it does, and those before the
last `held` ones are *handled*: a commit may pass them. A loop is an iterator of C, so
what was handed out is what its rows lack. It ends early when its gate is emptied: by
the next loop over the batch, by an interrupt, or where the partition goes (`stop`) or
the rest is to come again (`recall`), from any thread.

    handled | held: being handled | not handed out yet
    --------+---------------------+--------------------
            |<------ `held` ----->|
    |<---------- `handed` ------->|<---- `_left` ----->|
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, length_hint
from typing import Any

from metaq.client.consume.decode import MAKE, join, take_apart
from metaq.model import Message, Offset, TopicPartition


@dataclass(slots=True, eq=False)
class FetchedBatch:
    """Messages of one partition, in order; belongs to one worker while taken."""

    partition: TopicPartition
    messages: Sequence[Message]
    """Empty if all were filtered: then only `next_offset` matters."""
    next_offset: Offset
    """Offset after the last of them, filtered ones included."""
    size_bytes: int
    """Bytes of the log they came from."""
    held: int = 1
    """Number of the last messages handed out that are still being handled."""
    confirmed: int = 0
    reported: int = 0
    """Number of messages that were passed to `on_handled`."""
    is_fresh: Callable[[Message], bool] | None = None
    """Those for which it returns False are passed over; None: nothing is."""
    is_stopped: bool = False
    """Hand out no more: the partition is being revoked, or read elsewhere."""
    is_recalled: bool = False
    """Hand out no more: the rest of it comes in another batch, now or later."""
    is_awaited: bool = False
    on_replayed: Callable[[BaseException | None], object] | None = None
    """Of a kept message: called by its worker with the handler's error, or None."""
    _rows: Iterator[Any] = field(init=False)
    _left: Iterator[Any] | None = field(default=None, init=False)
    _gate: list[type[Message]] = field(default_factory=list, init=False)

    @property
    def handed(self) -> int:
        """Number of messages that were handed out."""
        left = self._left
        return 0 if left is None else len(self.messages) - length_hint(left)

    @property
    def is_halted(self) -> bool:
        """Whether no more of it may be handed out."""
        return self.is_stopped or self.is_recalled

    @property
    def is_used_up(self) -> bool:
        """Whether no more of it can be handed out."""
        return self.is_halted or self.handed == len(self.messages)

    def begin(self) -> Iterator[Message]:
        """Hand out the rest, one by one; messages handed out before are handled.

        No interpreted instruction runs per message: `_left` counts, and the iterator
        ends when its gate is emptied, by the next `begin` or from another thread.
        """
        self.confirm()
        self.held = 1
        return self._rest()

    def _rest(self) -> Iterator[Message]:
        if self._left is None:
            self._rows, self._left = take_apart(self.messages)
        self._gate.clear()
        self._gate = [Message] * length_hint(self._left)
        if self.is_halted:  # checked last: `stop` may come at any point
            self._gate.clear()
        rest = map(MAKE, self._gate, self._rows)
        return rest if self.is_fresh is None else filter(self.is_fresh, rest)

    def take(self, count_max: int) -> list[Message]:
        """Hand out up to `count_max`; messages handed out before are handled."""
        self.confirm()
        self.held = 0
        return self.take_more(count_max)

    def take_more(self, count_max: int) -> list[Message]:
        """Hand out up to `count_max`, to be handled together with those before."""
        held, before = self.held, self.handed
        # Until they are counted, no commit of another thread counts any of them.
        self.held = held + len(self.messages)
        taken = list(islice(self._rest(), count_max))
        # What was passed over after a message that is being handled counts with it.
        self.held = held + self.handed - before if taken or held else 0
        return taken

    def count_within(self, bytes_max: int) -> int:
        """Return how many of the rest, which has some, are within so many bytes."""
        at = self.handed
        end = self.messages[at].offset + bytes_max
        return bisect_right(self.messages, end, at, key=attrgetter("next_offset")) - at

    def grown(self, more: "FetchedBatch") -> "FetchedBatch":
        """Return a batch of what is being handled and of `more`, which is next.

        All of this one is handed out, and nothing of `more`.
        """
        being_handled = self.messages[self.handled :]
        grown = FetchedBatch(
            self.partition,
            join(being_handled, more.messages),
            more.next_offset,
            more.size_bytes,
            held=len(being_handled),
            is_fresh=self.is_fresh or more.is_fresh,
        )
        grown._rows, grown._left = take_apart(more.messages)
        return grown

    def interrupt(self) -> None:
        """End the iterator of `begin`; the next one goes on. From any thread."""
        self._gate.clear()

    def stop(self) -> None:
        """Hand out no more, not even to a running loop."""
        self.is_stopped = True
        self._gate.clear()

    def recall(self) -> None:
        """Hand out no more: the worker gives it back, and the rest comes again."""
        self.is_recalled = True
        self._gate.clear()

    @property
    def handled(self) -> int:
        """Number of handled messages: those handed out and not being handled."""
        return max(self.handed - self.held, self.confirmed, 0)

    def confirm(self) -> None:
        """Count the messages handed out as handled."""
        self.confirmed = self.handed
