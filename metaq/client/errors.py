"""What can go wrong between a client and a broker, beyond `metaq.errors`."""

from metaq.errors import ClientError, RequestTimeoutError


class ConnectionLostError(RequestTimeoutError):
    """The connection broke before the answer came; the outcome is unknown."""


class GivenUpError(RequestTimeoutError):
    """The connection broke and the broker stayed away; the outcome is unknown."""

    retriable = False


class UnexpectedReplyError(ClientError):
    """A broker answered something that no MetaQ broker says."""


class NoProgressError(ClientError):
    """Reading cannot go on: the broker's answers lead nowhere."""


class NoWallTimeError(ClientError):
    """A time was asked of messages that carry none (stamped by a Java broker)."""


class NotSentError(ClientError):
    """The connection broke before any byte of the request left: nothing was done."""

    retriable = True
    refresh_metadata = True


class CannotAnswerError(ClientError):
    """The broker has no answer to this question: MetaQ 1.4 does not know it."""


class StuckError(ClientError):
    """No progress although there is data and somebody free to take it."""
