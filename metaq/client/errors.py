"""Errors of clients, in addition to `metaq.errors`."""

from collections.abc import Sequence

from metaq.errors import (
    ClientError,
    NoBrokerError,
    RequestTimeoutError,
    TransactionError,
)
from metaq.model import BrokerId, Message, TopicPartition


class GivenUpError(RequestTimeoutError):
    """The connection broke, and the broker did not return; the outcome is unknown."""

    retriable = False


class NoProgressError(ClientError):
    """Reading cannot continue: a record is too large, or gets keep bringing nothing."""


class CannotAnswerError(ClientError):
    """The broker cannot answer this request, which MetaQ 1.4 does not support."""


class BehindLogEndError(ClientError):
    """An offset is after the log end, so the lag is unknown."""


class StuckError(ClientError):
    """No progress although there is data and a free worker."""


class OffsetStoreError(ClientError):
    """A store of offsets cannot be read or written; the message names it."""


class HandlerFailedError(ClientError):
    """A handler failed for a message, and the retry policy stops the run there."""

    def __init__(self, message: str, *, failed: Message, attempts: int) -> None:
        super().__init__(message)
        self.message = failed
        """The message; it does not count as handled."""
        self.attempts = attempts
        """Number of times that the handler was called with it."""


class OutcomeUnknownError(RequestTimeoutError):
    """The request was sent, and no answer shows whether it was carried out."""

    retriable = False


class MessageTooLargeError(ClientError):
    """The message is larger than the broker, or the buffer memory, accepts."""


class BufferFullError(ClientError):
    """The producer's buffer memory is full."""

    retriable = True

    def __init__(self, message: str, *, size_bytes: int, message_count: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes
        """Requested bytes, record headers included."""
        self.message_count = message_count
        """Requested number of messages."""


class PartlySentError(ClientError):
    """Some messages of a `send_many` are stored; others are not, or are in doubt."""

    def __init__(self, message: str, outcomes: Sequence[object]) -> None:
        super().__init__(message)
        self.outcomes = outcomes
        """One entry for each message, in their order: its `SendResult` or its error."""


class NoDelayError(ClientError):
    """The broker cannot delay messages: MetaQ 1.4, older, or in a replica set."""


class NoExchangesError(ClientError):
    """The broker has no exchanges: MetaQ 1.4, or an older version."""


class ExchangeError(ClientError):
    """An exchange exists already or does not exist, or is used as a topic."""


class PartitionsAwayError(NoBrokerError):
    """Partitions cannot be read because their broker is away."""

    def __init__(self, message: str, *, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)
        """Partitions that are away, in numeric order; () if the broker never
        answered."""


class NotSettledError(ClientError):
    """A member does not own all of its assigned partitions: others still own some."""

    retriable = True


class BrokerRegisteredError(ClientError):
    """A broker cannot be forgotten while it is registered."""


class GroupInUseError(ClientError):
    """A group cannot be changed or deleted while it has members."""


class QueueGroupError(ClientError):
    """A queue group exists, differs or is deleted, or a group is of the other kind."""


class TopicExistsError(ClientError):
    """A topic cannot be created: there is one of that name."""


class NoTopicError(NoBrokerError):
    """The topic does not exist: no broker serves, defines or has recorded it."""

    refresh_metadata = False


class TopicRefusedError(ClientError):
    """A broker refused a change of a topic."""


# -- queue groups ---------------------------------------------------------------------


class NoQueuesError(ClientError):
    """A broker of the topic has no queue groups; the message names it."""


class LeaseLostError(ClientError):
    """The lease of a message is over, and the message belongs to another delivery.

    It may be handled twice, because the work of this worker is not undone.
    """


class AlreadySettledError(ClientError):
    """A message is settled already, or is of another queue object."""


# -- request and reply ----------------------------------------------------------------


class NoMailboxError(ClientError):
    """No reachable broker has mailboxes for replies; the message names the brokers."""


class ReplyTimeoutError(ClientError):
    """No reply came in time; the request may have been handled, or may still be."""


class ErrorReply(ClientError):  # noqa: N818  # it is a reply, and says that
    """The handler of a request raised; its exception is in the message."""

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message)
        self.text = text
        """Type and text of the exception."""


# -- transactions ---------------------------------------------------------------------


class TransactionInDoubtError(OutcomeUnknownError, TransactionError):
    """A decision was sent, and no answer shows whether it was carried out.

    It has not failed. After the commit of a local transaction all of its messages are
    readable, or none ever will be. After a decision of an XA transaction, send the same
    decision again when the broker answers.
    """


class TransactionRolledBackError(TransactionError):
    """The transaction is rolled back: nothing of it is or will be stored."""


class LostBranchError(TransactionError):
    """The transaction is decided, but a broker has lost messages prepared for it."""


class XaError(TransactionError):
    """A broker answered with an XA error code."""

    def __init__(self, message: str, *, code: int, text: str) -> None:
        super().__init__(message)
        self.code = code
        """Number in the X/Open XA specification, such as -4 for XAER_NOTA."""
        self.text = text
        """The broker's message."""


class UnknownXidError(XaError):
    """There is no transaction with this id: never begun, timed out, or ended (-4)."""


class XaProtocolError(XaError):
    """The transaction's state does not allow the request (-6)."""


class XaRolledBackError(XaError, TransactionRolledBackError):
    """The broker itself has rolled the transaction back (100 to 107)."""


class HeuristicError(XaError):
    """An operator has ended the prepared transaction (5 to 8).

    7: committed; 6: rolled back; 5: partly each; 8: unknown. The broker keeps this
    outcome and returns it until a client calls `forget`.
    """


def group_gone(group: str, broker_id: BrokerId) -> QueueGroupError:
    """Return the error of a worker whose broker no longer has its group."""
    return QueueGroupError(
        f"broker {broker_id} no longer has queue group '{group}' as it was when this"
        " worker started: it was deleted, or created again, or this broker cannot"
        " reach ZooKeeper; open the queue again"
    )
