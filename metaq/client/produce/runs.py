"""Lists of messages, sorted into runs: the messages for one partition, in order.

For a list of plain bytes, no Python bytecode here runs per message.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from metaq.client.errors import BufferFullError
from metaq.client.names import require_text
from metaq.client.partitioner import OutgoingMessage
from metaq.client.produce.batches import Batch, SendResults, ends_of
from metaq.client.produce.partition_sender import PartitionSender
from metaq.client.produce.scheduling import with_expiry
from metaq.errors import ConfigError
from metaq.model import TAG, HeaderPairs
from metaq.record.checksum import BytesLike
from metaq.record.flags import Headers, encode_payload, list_headers
from metaq.record.layout import HEADER_BYTES


class Run:
    """Messages of a list for one partition, in their order. Owner: one caller."""

    def __init__(
        self,
        sender: PartitionSender | None,
        payloads: list[bytes],
        flags: list[int],
        *,
        may_move: bool,
    ) -> None:
        """Create a run of sorted messages.

        Args:
            sender: of all messages; None to send each batch to the next partition.
            payloads: at least one.
            flags: one for each payload; may be empty if all are 0.
            may_move: whether the messages may go to another partition.
        """
        self.sender = sender
        self.may_move = may_move
        self._payloads = payloads
        self._flags = flags if any(flags) else None
        self._next = 0
        self._ends = ends_of(payloads)
        self.largest_bytes = HEADER_BYTES + max(map(len, payloads))
        """Record bytes of the largest message."""

    @property
    def is_over(self) -> bool:
        """Whether all messages were added."""
        return self._next == len(self._payloads)

    def next_messages(
        self, bytes_max: int, count_max: int
    ) -> tuple[Sequence[bytes], Sequence[int] | None, Sequence[int]]:
        """Return the next messages, up to the limits of a batch; at least one.

        Returns:
            Payloads; flags, None if all are 0; and as `ends_of`, but not beginning
            with 0.
        """
        first, ends = self._next, self._ends
        end = bisect_right(ends, ends[first] + bytes_max, first) - 1
        end = max(first + 1, min(end, first + count_max))
        flags = self._flags
        if end - first == len(self._payloads):
            return self._payloads, flags, ends
        return (
            self._payloads[first:end],
            flags if flags is None else flags[first:end],
            ends[first : end + 1],
        )

    def advance(self, message_count: int) -> None:
        """Skip messages that were added."""
        self._next += message_count


class Appending:
    """A list that is being appended. Owner: the caller; not thread-safe.

    Call `step` until `is_over`; wait for memory whenever it returns an error. The
    outcomes of added messages come later.
    """

    def __init__(
        self,
        add: Callable[[Run], tuple[Batch, int, int]],
        runs: Sequence[Run],
        order: Sequence[int] | None,
    ) -> None:
        """Start with nothing added.

        Args:
            add: adds the next messages of a run; returns their batch, the index of the
                first one in it, and their number. Raises as `step`, and
                BufferFullError.
            runs: the runs to add; none for an empty list.
            order: for each message its index in the runs; None if it is the same.
        """
        self._add = add
        self._runs = runs
        self._order = order
        self._at = 0
        self._added: list[tuple[Batch, int, int]] = []

    def step(self) -> BufferFullError | None:
        """Add the next messages; return an error if too little memory is free now.

        Raises:
            ClosedError: the producer was closed; messages added before are sent.
        """
        run = self._runs[self._at]
        try:
            added = self._add(run)
        except BufferFullError as error:
            return error
        self._added.append(added)
        run.advance(added[2])
        if run.is_over:
            self._at += 1
        return None

    @property
    def is_over(self) -> bool:
        """Whether every message was added."""
        return self._at == len(self._runs)

    @property
    def batches(self) -> list[Batch]:
        """The batches that hold the added messages; a copy."""
        return list(dict.fromkeys(batch for batch, _, _ in self._added))

    def results(self) -> SendResults:
        """Return the results, in the order of the list; requires `is_over`."""
        assert self.is_over
        return SendResults(self._added, self._order)


def sort_runs(
    messages: Sequence[BytesLike | OutgoingMessage],
    select: Callable[[OutgoingMessage], tuple[PartitionSender | None, bool]],
) -> tuple[list[Run], list[int]]:
    """Sort messages by partition.

    Args:
        messages: at least one.
        select: returns a message's sender, and whether it may move from there.

    Returns:
        One run per partition, in the order of their first messages; and for each
        message its index among the messages of all runs.

    Raises:
        TypeError: data is not bytes-like.
        ConfigError: an attribute, a key or a header cannot be encoded.
    """
    groups: dict[PartitionSender | None, tuple[list[bytes], list[int], list[int]]] = {}
    fixed: set[PartitionSender | None] = set()
    for at, given in enumerate(messages):
        message = given
        if not isinstance(message, OutgoingMessage):
            message = OutgoingMessage(frozen(message))
        elif message.tag is not None:
            message = tagged(message)
        payload, flag = encode_outgoing(message)
        sender, may_move = select(message)
        if not may_move:
            fixed.add(sender)
        payloads, flags, numbers = groups.setdefault(sender, ([], [], []))
        payloads.append(payload)
        flags.append(flag)
        numbers.append(at)
    order = [0] * len(messages)
    sources = (at for _, _, numbers in groups.values() for at in numbers)
    for number, at in enumerate(sources):
        order[at] = number
    runs = [
        Run(sender, payloads, flags, may_move=sender not in fixed)
        for sender, (payloads, flags, _) in groups.items()
    ]
    return runs, order


def encode_outgoing(message: OutgoingMessage) -> tuple[bytes, int]:
    """Return (payload, flag) of a message.

    Raises:
        ConfigError: attribute, key or a header cannot be encoded.
        TypeError: one of its fields is of another type.
    """
    return encode_payload(
        frozen(message.data), message.attribute, message.key, message.headers
    )


def list_messages(
    messages: Iterable[BytesLike | OutgoingMessage],
) -> list[BytesLike | OutgoingMessage]:
    """Return the user's messages as a list.

    Raises:
        TypeError: it is a single message, or not iterable.
    """
    # `list` of bytes would give numbers.
    if not isinstance(messages, bytes | bytearray | memoryview | str):
        try:
            return list(messages)
        except TypeError:
            if isinstance(messages, Iterable):
                raise  # raised by the user's generator
    raise TypeError(
        f"messages: expected a list of bytes or OutgoingMessage, got"
        f" {type(messages).__name__}"
    )


def with_common(
    messages: Iterable[BytesLike | OutgoingMessage], tag: str | None, expires_in: object
) -> Iterable[BytesLike | OutgoingMessage]:
    """Return messages with a tag and the header of `with_expiry`; None adds neither."""
    if tag is None and expires_in is None:
        return messages
    listed = list_outgoing(messages)
    if tag is not None:
        listed = [one._replace(headers=with_tag(one.headers, tag)) for one in listed]
    return [
        one._replace(headers=with_expiry(one.headers, expires_in)) for one in listed
    ]


def tagged(message: OutgoingMessage) -> OutgoingMessage:
    """Return a message with its tag as a header; raises as `with_tag`."""
    if message.tag is None:
        return message
    return message._replace(headers=with_tag(message.headers, message.tag), tag=None)


def with_tag(headers: Headers, tag: str) -> HeaderPairs:
    """Return headers with the header of a tag appended.

    Raises:
        ConfigError: they have a tag; the tag is not UTF-8; or as `list_headers`.
        TypeError: the tag is not a str; or as `list_headers`.
    """
    require_text("tag", tag)
    pairs = list_headers(headers) if headers else ()
    if any(name == TAG for name, _ in pairs):
        raise ConfigError("tag: expected it once, got a header of this name as well")
    try:
        return (*pairs, (TAG, tag.encode()))
    except UnicodeEncodeError as error:
        raise ConfigError(f"tag {tag!r:.80} is no UTF-8") from error


def frozen(data: BytesLike) -> bytes:
    """Return immutable bytes: the same object, or a copy.

    Raises:
        TypeError: `data` is not bytes-like. (From an int, `bytes` would make zeros.)
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"data: expected bytes-like, got {type(data).__name__}")


def list_outgoing(
    messages: Iterable[BytesLike | OutgoingMessage],
) -> list[OutgoingMessage]:
    """Return the user's messages as `OutgoingMessage`s; raises as `list_messages`."""
    return [
        tagged(one)
        if isinstance(one, OutgoingMessage)
        else OutgoingMessage(frozen(one))
        for one in list_messages(messages)
    ]
