"""Errors between a client and a broker, beyond `metaq.errors`."""

from collections.abc import Sequence

from metaq.errors import (
    ClientError,
    NoBrokerError,
    RequestTimeoutError,
    TransactionError,
)
from metaq.model import BrokerId, Message, TopicPartition


class GivenUpError(RequestTimeoutError):
    """The connection broke and the broker stayed away; the outcome is unknown."""

    retriable = False


class NoProgressError(ClientError):
    """Reading cannot go on: the broker's answers lead nowhere."""


class CannotAnswerError(ClientError):
    """The broker has no answer to this question: MetaQ 1.4 does not know it."""


class BehindLogEndError(ClientError):
    """An offset is after the log end: how much was not handled is not known."""


class StuckError(ClientError):
    """No progress although there is data and a free worker."""


class OffsetStoreError(ClientError):
    """A store of offsets cannot be read or written; the message names it."""


class HandlerFailedError(ClientError):
    """A handler could not handle a message, and the policy says to stop there."""

    def __init__(self, message: str, *, failed: Message, attempts: int) -> None:
        super().__init__(message)
        self.message = failed
        """The message; it does not count as handled."""
        self.attempts = attempts
        """Number of times that the handler had it."""


class OutcomeUnknownError(RequestTimeoutError):
    """It was sent, and no answer came, or one that left it open: stored, or not."""

    retriable = False


class MessageTooLargeError(ClientError):
    """No broker, or no buffer, takes a message of this size."""


class BufferFullError(ClientError):
    """The producer's buffer memory is full."""

    retriable = True

    def __init__(self, message: str, *, size_bytes: int, message_count: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes
        """Room that was asked for, record headers included."""
        self.message_count = message_count
        """Messages that it was asked for."""


class PartlySentError(ClientError):
    """Some messages of a `send_many` are stored; others are not, or are in doubt."""

    def __init__(self, message: str, outcomes: Sequence[object]) -> None:
        super().__init__(message)
        self.outcomes = outcomes
        """One for each message, in their order: its `SendResult`, or its error."""


class NoDelayError(ClientError):
    """The broker delivers no message later: MetaQ 1.4, an older one, or a replica."""


class NoExchangesError(ClientError):
    """The broker routes no messages: it is an older one, or of MetaQ 1.4."""


class ExchangeError(ClientError):
    """An exchange is there, or defined otherwise, or is none."""


class PartitionsAwayError(NoBrokerError):
    """Partitions cannot be read: their broker is away."""

    def __init__(self, message: str, *, partitions: Sequence[TopicPartition]) -> None:
        super().__init__(message)
        self.partitions = tuple(partitions)
        """Partitions away, in numeric order; () where the broker never answered."""


class NotSettledError(ClientError):
    """A member does not have all partitions assigned to it: others own them still."""

    retriable = True


class BrokerRegisteredError(ClientError):
    """A broker that was to be forgotten is there."""


class GroupInUseError(ClientError):
    """A group that was to be moved, or to filter otherwise, has members that read."""


class QueueGroupError(ClientError):
    """A queue group is defined otherwise or deleted, or a name is of the other kind."""


class TopicExistsError(ClientError):
    """A topic was to be made, and there is one of that name."""


class NoTopicError(NoBrokerError):
    """Nothing is known of a topic: no broker serves, defines or has recorded it."""

    refresh_metadata = False


class TopicRefusedError(ClientError):
    """A broker refused a change of a topic."""


# -- queue groups ---------------------------------------------------------------------


class NoQueuesError(ClientError):
    """A broker of the topic does not know queue groups; the message names it."""


class LeaseLostError(ClientError):
    """The lease of a message is over, and another delivery has it.

    It may be handled twice: what this worker did with it is not undone.
    """


class AlreadySettledError(ClientError):
    """A message was settled a second time, or through another queue."""


# -- request and reply ----------------------------------------------------------------


class NoMailboxError(ClientError):
    """No broker of the cluster has mailboxes for replies; the message names them."""


class ReplyTimeoutError(ClientError):
    """No reply came in time: the request may have been handled, or may be yet."""


class ErrorReply(ClientError):  # noqa: N818  # it is a reply, and says that
    """The handler of a request has failed; its exception is in the message."""

    def __init__(self, message: str, *, text: str) -> None:
        super().__init__(message)
        self.text = text
        """Type and text of the exception."""


# -- transactions ---------------------------------------------------------------------


class TransactionInDoubtError(OutcomeUnknownError, TransactionError):
    """A decision was sent, and no answer says whether it was carried out.

    In doubt, not failed. A commit of a local transaction: its messages are readable,
    all of them, or none ever will be. A decision of an XA transaction: send the same
    decision again when the broker answers.
    """


class TransactionRolledBackError(TransactionError):
    """Nothing of the transaction is stored, and nothing of it ever will be."""


class LostBranchError(TransactionError):
    """It is decided, and a broker lacks messages that it had promised to keep."""


class XaError(TransactionError):
    """A broker answered with an XA error code."""

    def __init__(self, message: str, *, code: int, text: str) -> None:
        super().__init__(message)
        self.code = code
        """As the X/Open XA specification numbers it: -4 is XAER_NOTA."""
        self.text = text
        """The broker's own words."""


class UnknownXidError(XaError):
    """No transaction of this id: never begun, timed out, or ended before (-4)."""


class XaProtocolError(XaError):
    """The transaction is in a state that does not allow this (-6)."""


class XaRolledBackError(XaError, TransactionRolledBackError):
    """The broker has rolled the transaction back by itself (100 to 107)."""


class HeuristicError(XaError):
    """An operator has ended the prepared transaction (5 to 8).

    7: committed; 6: rolled back; 5: partly this, partly that; 8: not known. The
    broker remembers it, and answers so, until a client has it forget it.
    """


def group_gone(group: str, broker_id: BrokerId) -> QueueGroupError:
    """Return the error of a worker whose group its broker does not know any more."""
    return QueueGroupError(
        f"broker {broker_id} no longer has queue group '{group}' as it was when this"
        " worker started: it was deleted, or created again, or this broker cannot"
        " reach ZooKeeper; open the queue again"
    )
