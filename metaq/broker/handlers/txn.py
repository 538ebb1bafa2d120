"""`transaction`, `transactions` and `sync`.

The coordinator (`txn/coordinator.py`) carries out the commands; END is never answered.
A MetaQ leader replicates to a follower by `sync`, which this broker refuses with 503
and MetaQ's text.

Source: docs/metaq-1.4/broker.md 1.2 (rule 9), 5.4, 5.5.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final, assert_never

from metaq.broker.acks import REFUSALS, Answerer, refuse_put, require_checksum
from metaq.broker.transactions import TransactionAnswer, put_run, refusal_of
from metaq.errors import (
    ForbiddenError,
    RemoteProtocolError,
    ServerError,
    TransactionError,
    UnavailableError,
)
from metaq.model import RANDOM_PARTITION, LogId, NullTransactionId
from metaq.protocol import texts
from metaq.protocol.commands import (
    CommitTogether,
    Mput,
    Put,
    Sync,
    TransactionCommand,
    TransactionType,
)
from metaq.protocol.encoding import encode
from metaq.protocol.transaction_ids import decode_keys, format_key
from metaq.record.checksum import checksum
from metaq.record.layout import encode_record
from metaq.txn.records import encode_put
from metaq.txn.transaction import BrokerTransaction, PutRun

KEYS_STEP_COUNT: Final = 256
"""Number of keys parsed in one step: some milliseconds."""


def handle_transaction(command: TransactionCommand, answerer: Answerer) -> bytes | None:
    """Carry out a transaction command.

    Returns:
        The body of a 200; None: the command is answered later, or never.

    Raises:
        ServerError: refused; the text is MetaQ's.
    """
    try:
        return _handle(command, answerer)
    except TransactionError as error:
        raise refusal_of(error) from error


def _handle(command: TransactionCommand, answerer: Answerer) -> bytes | None:
    context = answerer.context
    transactions, kind = context.transactions, command.type
    if kind is TransactionType.END:
        return None
    if kind is TransactionType.RECOVER:
        return "\r\n".join(transactions.recover(command.qualifier)).encode()
    if isinstance(command.transaction, NullTransactionId):
        raise ServerError(texts.no_transaction(kind.value))
    key = format_key(command.transaction)
    if kind is TransactionType.BEGIN:
        transactions.begin(key, answerer, command.timeout_s, command.session_id)
        return b""
    with _answered_later(command, answerer) as later:
        match kind:
            case TransactionType.PREPARE:
                transactions.prepare(key, answerer, later.on_voted, later.on_done)
            case TransactionType.COMMIT_ONE_PHASE | TransactionType.COMMIT_TWO_PHASE:
                is_two_phase = kind is TransactionType.COMMIT_TWO_PHASE
                transactions.commit(
                    key, answerer, later.on_done, is_two_phase=is_two_phase
                )
            case TransactionType.ROLLBACK:
                transactions.rollback(key, answerer, later.on_done)
            case TransactionType.FORGET:
                transactions.forget(key, later.on_done)
            case _:  # pragma: no cover
                assert_never(kind)
    return None


def handle_commit_together(
    command: CommitTogether, answerer: Answerer
) -> Generator[None]:
    """Commit several transactions; answer once the outcome of each is known.

    Raises:
        ServerError: refused; nothing was committed.
    """
    context, keys = answerer.context, list[str]()
    try:
        for each in decode_keys(command.payload, command.count):
            keys.append(format_key(each))
            if not len(keys) % KEYS_STEP_COUNT:
                yield
        with _answered_later(command, answerer) as later:
            context.transactions.commit_together(keys, later.on_outcomes)
    except RemoteProtocolError as error:
        raise ServerError(str(error)) from error
    except TransactionError as error:
        raise refusal_of(error) from error


@contextmanager
def _answered_later(
    command: TransactionCommand | CommitTogether, answerer: Answerer
) -> Iterator[TransactionAnswer]:
    """Yield the later reply to a command; if an error is raised, no reply is sent."""
    later = TransactionAnswer(answerer, command)
    try:
        yield later
    except (TransactionError, MemoryError):
        later.give_up()
        raise


def find_transaction(
    command: Put | Mput, answerer: Answerer, *, count: int = 1
) -> BrokerTransaction:
    """Return the transaction of a put with `count` messages.

    Raises:
        WireError: the transaction or partition takes no puts; the text is the reply.
    """
    context = answerer.context
    topic, partition = command.topic, command.partition
    assert command.transaction is not None, "a put of a transaction"
    key = format_key(command.transaction)
    try:
        found = context.transactions.find_for_put(key, answerer)
    except TransactionError as error:
        raise ServerError(str(error)) from error
    if partition == RANDOM_PARTITION:
        raise ServerError(texts.invalid_transactional_partition(partition))
    if topic in context.topics.exchanges:
        return found
    try:
        # A missing topic or partition is refused without a prefix, as by MetaQ.
        context.topics.open_for_put(topic, partition)
    except ForbiddenError as error:
        raise refuse_put(context, error, LogId(topic, partition), count) from error
    return found


def handle_transactional_put(command: Put, answerer: Answerer) -> None:
    """Journal a put of a transaction; it is answered once that is written.

    Raises:
        WireError: refused; the text is the reply.
    """
    context = answerer.context
    topic, partition, payload = command.topic, command.partition, command.payload
    tx = find_transaction(command, answerer)
    try:
        require_checksum(checksum(payload), command.checksum)
        log_id = context.topics.log_for_put(topic, partition).log_id
    except REFUSALS as error:
        raise refuse_put(context, error, LogId(topic, partition)) from error
    message_id = context.ids.reserve(1)
    record = encode_record(payload, id=message_id, flag=command.flag)
    journalled = (encode_put(message_id, encode(command)),)
    put_run(
        tx,
        PutRun(log_id, (record,), len(record), 1, message_id, journalled),
        answerer,
        opaques=(b"%d" % command.opaque,),
        ids=(message_id,),
    )


def handle_sync(_command: Sync) -> None:
    """Refuse a replicated message, because this broker is not a MetaQ follower.

    Raises:
        UnavailableError: always.
    """
    raise UnavailableError(texts.NO_SYNC_PROCESSOR)
