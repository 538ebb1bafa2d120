"""Maps commands to handlers, and errors to replies.

A handler returns the body of a 200, raises a `WireError` (its number and text become
the reply), or sends the reply itself later. Any other exception is a bug: it is logged
with its traceback and answered 500. The connection stays usable, because all bytes of
the command were consumed.
"""

import logging
from collections.abc import Generator
from typing import TypeAlias, assert_never

from metaq.broker.acks import Answerer
from metaq.broker.context import BrokerContext, DelayedMessages, QueueGroups
from metaq.broker.handlers.check import handle_check
from metaq.broker.handlers.filtered_get import answer_get
from metaq.broker.handlers.find import handle_find
from metaq.broker.handlers.follow import handle_follow
from metaq.broker.handlers.get import GetAnswerer
from metaq.broker.handlers.offset import handle_offset
from metaq.broker.handlers.put import handle_mput, handle_put, handle_put_in_pieces
from metaq.broker.handlers.stats import handle_stats, handle_version
from metaq.broker.handlers.txn import (
    handle_commit_together,
    handle_sync,
    handle_transaction,
)
from metaq.errors import ServerError, UnavailableError, WireError
from metaq.protocol import texts
from metaq.protocol.commands import (
    Answer,
    Cancel,
    Check,
    CommitTogether,
    Find,
    Follow,
    Get,
    Listen,
    ListScheduled,
    Mput,
    OffsetQuery,
    Put,
    Settle,
    Stats,
    Status,
    Sync,
    Take,
    TransactionCommand,
    Version,
)
from metaq.protocol.connection import InPieces, Oversized
from metaq.protocol.encoding import encode_refusal, encode_result

_log = logging.getLogger(__name__)

Large: TypeAlias = Mput | Stats | CommitTogether | InPieces
"""Commands that may take longer than a turn of the loop."""

Small: TypeAlias = (
    Put
    | Get
    | OffsetQuery
    | Check
    | Take
    | Settle
    | Cancel
    | ListScheduled
    | Find
    | Listen
    | Answer
    | Version
    | TransactionCommand
    | Sync
    | Follow
    | Oversized
)
"""All other commands; the session handles a quit."""


def dispatch(command: Small, answerer: GetAnswerer) -> bytes:
    """Carry out one command.

    Returns:
        The reply; b"" if it is sent later, or never.

    Raises:
        MemoryError: the command may be half done; the connection must end.
    """
    try:
        body = _handle(command, answerer)
    except MemoryError:
        raise  # the command may be half done: the session ends
    except Exception as error:  # noqa: BLE001  # logged and answered
        return encode_failure(error, command, answerer.context)
    return b"" if body is None else encode_result(Status.OK, body, command.opaque)


def dispatch_in_steps(
    command: Large, answerer: Answerer
) -> Generator[None, None, bytes]:
    """Carry out one command in steps; returns and raises as `dispatch`."""
    cause = command.command if isinstance(command, InPieces) else command
    try:
        match command:
            case Stats():
                body = yield from handle_stats(command, answerer.context)
                return encode_result(Status.OK, body, command.opaque)
            case CommitTogether():
                yield from handle_commit_together(command, answerer)
            case Mput():
                yield from handle_mput(command, [command.payload], answerer)
            case InPieces(Mput() as mput, pieces):
                yield from handle_mput(mput, pieces, answerer)
            case InPieces(Put() as put, pieces):
                yield from handle_put_in_pieces(put, pieces, answerer)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # logged and answered
        return encode_failure(error, cause, answerer.context)
    return b""


def encode_failure(
    error: Exception,
    command: Small | Mput | Stats | CommitTogether,
    context: BrokerContext,
) -> bytes:
    """Return the reply to a failed command; log errors other than WireError."""
    if isinstance(error, WireError):
        return encode_refusal(error, command.opaque)
    context.counters.error_count += 1
    _log.error("command failed: command=%s", type(command).__name__, exc_info=error)
    text = texts.INTERNAL_ERROR.encode()
    return encode_result(Status.SERVER_ERROR, text, command.opaque)


def queues_of(context: BrokerContext) -> QueueGroups:
    """Return the queue groups.

    Raises:
        UnavailableError: this broker serves none.
    """
    if context.queues is None:
        raise UnavailableError(texts.NO_QUEUES)
    return context.queues


def delays_of(context: BrokerContext) -> DelayedMessages:
    """Return the delayed messages.

    Raises:
        UnavailableError: this broker has none.
    """
    if context.delays is None:
        raise UnavailableError(texts.NO_DELAY)
    return context.delays


def _handle(command: Small, answerer: GetAnswerer) -> bytes | None:
    match command:
        case Put():
            handle_put(command, answerer)
        case Get():
            answer_get(command, answerer)
        case OffsetQuery():
            return handle_offset(command, answerer)
        case Check():
            handle_check(command, answerer)
        case Take():
            queues_of(answerer.context).take(command, answerer)
        case Settle():
            queues_of(answerer.context).settle(command, answerer)
        case Cancel():
            delays_of(answerer.context).cancel(command, answerer)
        case ListScheduled():
            delays_of(answerer.context).show(command, answerer)
        case Find():
            handle_find(command, answerer)
        case Listen():
            context = answerer.context
            context.mailboxes.listen(command, answerer, context.config.limits)
        case Answer():
            return answerer.context.mailboxes.answer(command)
        case Version():
            return handle_version(answerer.context)
        case TransactionCommand():
            return handle_transaction(command, answerer)
        case Sync():
            handle_sync(command)
        case Follow():
            handle_follow(command, answerer)
        case Oversized():
            answerer.context.counters.put_failed += 1
            answerer.context.counters.rejections["oversized"] += 1
            raise ServerError(
                texts.too_large(command.word, command.length, command.limit)
            )
        case _:  # pragma: no cover
            assert_never(command)
    return None
