"""Search for the end of a gap in the log of a broker that cannot report damage. Pure.

A MetaQ 1.4 broker cannot report that its log is damaged. Where a segment is truncated
or the disk cannot be read, it always replies "nothing there" or refuses, although its
log continues. The search therefore gets single bytes: at the log end, at the offset
once more, then at growing distances after it, and finally by bisection between the last
offset without data and the first one with data.

    offset          bad   probe   good                     end
      |--no data-----|------?------|--data-- ...            |

Bytes that are not readable *yet* are at the end of a log, with nothing after them: then
the search finds no gap, and nothing may be skipped. They may become readable during the
search, in the order of their offsets. So, once data was found, the last byte before it
and then the first byte are requested once more.

Source: docs/metaq-1.4/broker.md 1.5 and 2.4.
"""

from metaq.errors import ServerError
from metaq.model import MAX_OFFSET, Offset
from metaq.peer.replies import Fetched, GetOutcome, MovedTo, NothingThere, parse_get
from metaq.protocol.commands import Reply


def parse_probe(reply: Reply, asked: Offset) -> GetOutcome:
    """Parse the reply to a get of a search, as `parse_get`; a refusal is no data."""
    try:
        return parse_get(reply, asked)
    except ServerError:
        return NothingThere()


class GapSearch:
    """Search for the next readable byte after an offset without data.

    Owned by a reader, which gets the byte at `fetch_offset` until `is_over`.
    """

    def __init__(self, offset: Offset) -> None:
        """Start at an offset for which the broker gave no data."""
        self.fetch_offset = MAX_OFFSET
        """Offset of the next get, of any size."""
        self.is_over = False
        self.found: Offset | None = None
        """Offset of the first readable byte after the gap; None: there is no gap."""
        self.log_end: Offset | None = None
        """Log end that the broker reported; None: it has no log, or no reply came."""
        self._offset = offset
        self._end = offset
        self._bad = offset
        self._good: Offset | None = None
        self._is_checking = False

    @property
    def flaw(self) -> str:
        """Description of the gap found."""
        return f"the broker gives no data before offset {self.found}"

    def on_reply(self, outcome: GetOutcome) -> None:
        """Handle the reply to a get at `fetch_offset`, parsed by `parse_probe`."""
        if self.fetch_offset == MAX_OFFSET:
            is_end = isinstance(outcome, MovedTo) and outcome.offset > self._offset
            self.is_over = not is_end
            if isinstance(outcome, MovedTo):
                self.log_end = self._end = outcome.offset
                self.fetch_offset = self._offset
        elif isinstance(outcome, MovedTo):
            # The log has been replaced.
            self.is_over = True
        elif isinstance(outcome, Fetched):
            self._on_data()
        else:
            self._on_nothing()

    def _on_data(self) -> None:
        if self.fetch_offset == self._offset or self._is_checking:
            # It is readable again, or was written during the search.
            self.is_over = True
            return
        self._good = self.fetch_offset
        self._halve(self._good)

    def _on_nothing(self) -> None:
        if self._is_checking:
            is_all = self.fetch_offset == self._offset
            self.is_over, self.fetch_offset = is_all, self._offset
            self.found = self._good if is_all else None
            return
        self._bad = self.fetch_offset
        if self._good is not None:
            self._halve(self._good)
        elif self._bad >= self._end - 1:
            self.is_over = True
        else:
            step = max(1, self._bad - self._offset)
            self.fetch_offset = Offset(min(self._bad + step, self._end - 1))

    def _halve(self, good: Offset) -> None:
        if good - self._bad > 1:
            self.fetch_offset = Offset((self._bad + good) // 2)
        else:
            self._is_checking, self.fetch_offset = True, self._bad
