"""The transactions of a fake MetaQ 1.4 broker, from memory; part of `fake_metaq.py`.

Held to the recorded conversations of a Java broker, with what clients must live with: a
put after the PREPARE is acknowledged and lost, and a local transaction can be reached
over its own connection alone.

Source: docs/metaq-1.4/broker.md 5.1 to 5.5, 5.8.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from metaq.clock import Clock
from metaq.errors import ServerError
from metaq.model import LocalTransactionId, TransactionId, XaTransactionId
from metaq.protocol.commands import Put, TransactionCommand, TransactionType
from metaq.protocol.transaction_ids import format_key

RMERR: Final = -3
NOTA: Final = -4
PROTO: Final = -6

_NULL_BEGIN: Final = (
    "class com.taobao.metamorphosis.transaction.NullTransactionId cannot be cast to"
    " class com.taobao.metamorphosis.transaction.LocalTransactionId"
    " (com.taobao.metamorphosis.transaction.NullTransactionId and"
    " com.taobao.metamorphosis.transaction.LocalTransactionId are in unnamed module of"
    " loader 'app')"
)

Held: TypeAlias = tuple[Put, int]
"""A put of a transaction, and the id that it was given."""
Place: TypeAlias = tuple[object, TransactionId]
"""Connection of a transaction, None for an XA one, and its id."""


class Heuristic(Enum):
    """Outcomes that an operator decides: MetaQ's code, and its word."""

    COMMITTED = (7, "committed")
    ROLLED_BACK = (6, "rolled back")
    COMPLETED = (8, "completed")


@dataclass(slots=True)
class _Transaction:
    ends_s: float | None
    puts: list[Held] = field(default_factory=list)
    lost: list[Held] = field(default_factory=list)
    is_prepared: bool = False

    def require_prepared(self) -> None:
        if not self.is_prepared:
            text = "Cannot do 2 phase commit if the transaction has not been prepared."
            raise _xa_error(PROTO, text)


class FakeTransactions:
    """All transactions of one broker. Not thread-safe; its owner serialises."""

    def __init__(self, clock: Clock, append: Callable[[Put, int], object]) -> None:
        """Begin without any.

        Args:
            clock: for their time-outs.
            append: stores a put that is committed, under its id.
        """
        self._clock = clock
        self._append = append
        self._live: dict[Place, _Transaction] = {}
        self._heuristic: dict[XaTransactionId, Heuristic] = {}

    # -- for the test -----------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the keys of those that have not ended."""
        self._expire()
        return [format_key(transaction) for _, transaction in self._live]

    def end(self, transaction: XaTransactionId, outcome: Heuristic) -> None:
        """End a prepared one as an operator does."""
        found = self._live.pop((None, transaction))
        assert found.is_prepared
        if outcome is Heuristic.COMMITTED:
            self._commit(found)
        self._heuristic[transaction] = outcome

    def restart(self) -> None:
        """Keep what is prepared, as a broker does that was killed."""
        self._live = {p: one for p, one in self._live.items() if one.is_prepared}

    # -- commands ---------------------------------------------------------------------

    def put(self, put: Put, number: int, connection: object) -> None:
        """Hold a put.

        Raises:
            ServerError: the transaction is not there.
        """
        assert put.transaction is not None
        found = self._find(put.transaction, connection, is_put=True)
        (found.lost if found.is_prepared else found.puts).append((put, number))

    def require(self, transaction: TransactionId, connection: object) -> None:
        """Raise what a put of a transaction is answered with that is not there."""
        self._find(transaction, connection, is_put=True)

    def answer(self, command: TransactionCommand, connection: object) -> str:
        """Carry out a command; return the text of its 200.

        Raises:
            ServerError: as MetaQ words it.
        """
        transaction, kind = command.transaction, command.type
        match kind:
            case TransactionType.BEGIN:
                self._begin(command, connection)
                return ""
            case TransactionType.RECOVER:
                return self._recover(command.qualifier)
            case TransactionType.FORGET:
                if not isinstance(transaction, XaTransactionId):
                    text = f"{format_key(transaction)} is not a valid xid"
                    raise _xa_error(NOTA, text)
                self._heuristic.pop(transaction, None)
                return ""
        found = self._find(transaction, connection)
        if kind is TransactionType.PREPARE:
            return self._prepare(transaction, found)
        is_global = isinstance(transaction, XaTransactionId)
        if kind is TransactionType.COMMIT_TWO_PHASE and is_global:
            found.require_prepared()
        if kind is not TransactionType.ROLLBACK:
            self._commit(found)
        del self._live[_place(transaction, connection)]
        return ""

    def _begin(self, command: TransactionCommand, connection: object) -> None:
        transaction = command.transaction
        if not isinstance(transaction, LocalTransactionId | XaTransactionId):
            raise ServerError(_NULL_BEGIN)
        self._expire()
        ends_s = None
        if command.timeout_s > 0:
            ends_s = self._clock.monotonic_s() + command.timeout_s
        self._live.setdefault(_place(transaction, connection), _Transaction(ends_s))

    def _prepare(self, transaction: TransactionId, found: _Transaction) -> str:
        if not isinstance(transaction, XaTransactionId):
            text = "Prepare not implemented on Local Transactions."
            raise _xa_error(RMERR, text)
        if found.is_prepared:
            raise _xa_error(PROTO, "Cannot call prepare now.")
        if not found.puts:
            del self._live[None, transaction]
            return "3"
        found.is_prepared = True
        return "0"

    def _recover(self, qualifier: str | None) -> str:
        listed = [
            transaction
            for (_, transaction), found in self._live.items()
            if found.is_prepared and isinstance(transaction, XaTransactionId)
        ]
        listed += self._heuristic
        return "\r\n".join(
            format_key(one)
            for one in listed
            if qualifier is None or one.qualifier == qualifier
        )

    def _commit(self, found: _Transaction) -> None:
        for put, number in found.puts:
            self._append(put, number)

    def _find(
        self, transaction: TransactionId, connection: object, *, is_put: bool = False
    ) -> _Transaction:
        self._expire()
        if isinstance(transaction, XaTransactionId):
            outcome = self._heuristic.get(transaction)
            key = format_key(transaction)
            if outcome is not None:
                code, word = outcome.value
                text = f"XA transaction '{key}' has been heuristically {word}."
                raise ServerError(text) if is_put else _xa_error(code, text)
            found = self._live.get((None, transaction))
            if found is None:
                text = f"XA transaction '{key}' has not been started."
                raise ServerError(text) if is_put else _xa_error(NOTA, text)
            return found
        found = self._live.get((connection, transaction))
        if found is None:
            key = format_key(transaction)
            raise ServerError(f"Local transaction '{key}' has not been started.")
        return found

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        self._live = {
            place: one
            for place, one in self._live.items()
            if one.is_prepared or one.ends_s is None or now_s < one.ends_s
        }


def _place(transaction: TransactionId, connection: object) -> Place:
    is_global = isinstance(transaction, XaTransactionId)
    return None if is_global else connection, transaction


def _xa_error(code: int, text: str) -> ServerError:
    return ServerError(f"XAException:code={code},msg={text}")
