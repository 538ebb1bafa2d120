"""A fetched batch: messages of one partition, and how many of them are handled.

Theory of operation. A batch hands out its messages in order: one by one to a loop
(`begin`), or several at once (`take`). It counts them; all but the last `held` ones
handed out are *handled*, and may be committed. A loop is an iterator in C, so the
number handed out follows from the rows that are left. The loop ends early when its gate
is emptied, from any thread: by the next loop over the batch, by an interrupt, when the
partition is revoked (`stop`), or when the rest will be delivered again (`recall`).

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
    """Messages of one partition, in order; owned by one worker at a time."""

    partition: TopicPartition
    messages: Sequence[Message]
    """Empty if all were filtered out; then only `next_offset` matters."""
    next_offset: Offset
    """Offset after the last message, including filtered ones."""
    size_bytes: int
    """Size of their bytes in the log."""
    held: int = 1
    """Number of messages, the last ones handed out, that are still being handled."""
    confirmed: int = 0
    reported: int = 0
    """Number of messages that were passed to `on_handled`."""
    is_fresh: Callable[[Message], bool] | None = None
    """Returns False for messages to pass over; None: pass over none."""
    is_stopped: bool = False
    """Whether handing out has ended because the partition is revoked or was sought."""
    is_recalled: bool = False
    """Whether handing out has ended because the rest comes in another batch."""
    is_awaited: bool = False
    on_replayed: Callable[[BaseException | None], object] | None = None
    """For a parked message: called by its worker with the handler's error or None."""
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
        """Hand out the rest, one by one; messages handed out before count as handled.

        No interpreted instruction runs per message: the length of `_left` counts, and
        the iterator ends when its gate is emptied, by the next `begin` or by another
        thread.
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
        """Hand out up to `count_max`; messages handed out before count as handled."""
        self.confirm()
        self.held = 0
        return self.take_more(count_max)

    def take_more(self, count_max: int) -> list[Message]:
        """Hand out up to `count_max`, to be handled together with the held ones."""
        held, before = self.held, self.handed
        # Hold all until they are counted, so that no other thread commits them.
        self.held = held + len(self.messages)
        taken = list(islice(self._rest(), count_max))
        # Messages passed over after one that is being handled are held with it.
        self.held = held + self.handed - before if taken or held else 0
        return taken

    def count_within(self, bytes_max: int) -> int:
        """Return how many next messages are within `bytes_max`; some must be left."""
        at = self.handed
        end = self.messages[at].offset + bytes_max
        return bisect_right(self.messages, end, at, key=attrgetter("next_offset")) - at

    def grown(self, more: "FetchedBatch") -> "FetchedBatch":
        """Return a batch of the messages being handled, followed by `more`.

        All messages of this batch must be handed out, and none of `more`.
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
        """End the iterator of `begin`; the next one continues. For any thread."""
        self._gate.clear()

    def stop(self) -> None:
        """Hand out no more, not even to a running loop."""
        self.is_stopped = True
        self._gate.clear()

    def recall(self) -> None:
        """Hand out no more; its worker gives it back, and the rest comes again."""
        self.is_recalled = True
        self._gate.clear()

    @property
    def handled(self) -> int:
        """Number of handled messages: handed out and no longer being handled."""
        return max(self.handed - self.held, self.confirmed, 0)

    def confirm(self) -> None:
        """Count the messages handed out as handled."""
        self.confirmed = self.handed
