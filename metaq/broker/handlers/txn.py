"""`transaction` and `sync`: understood, and not offered by this broker.

`sync` is how a leader replicates to a follower; a broker that is no follower answers
503 in MetaQ's own words (broker spec 1.2, rule 9). Transactions are refused with one
sentence; END is never answered, whatever becomes of it (broker spec 5.4).
"""

from typing import Final

from metaq.errors import ServerError, UnavailableError
from metaq.protocol import texts
from metaq.protocol.commands import Sync, TransactionCommand, TransactionType

TRANSACTIONS_MISSING: Final = "Transactions are not supported by this broker."
"""Answer to every transaction command, and to a put that carries a transaction."""


def handle_transaction(command: TransactionCommand) -> None:
    """Refuse a transaction command; END is passed over in silence.

    Raises:
        ServerError: always, but for END.
    """
    if command.type is not TransactionType.END:
        raise ServerError(TRANSACTIONS_MISSING)


def handle_sync(_command: Sync) -> None:
    """Refuse a replicated message: this broker is no follower.

    Raises:
        UnavailableError: always.
    """
    raise UnavailableError(texts.NO_SYNC_PROCESSOR)
