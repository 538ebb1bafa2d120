"""Parsers of replies to transaction commands: votes, prepared xids, errors. Pure.

    XAException:code=<code>,msg=<text>     error reply to a transaction command
    <text>                                 the same error in reply to a put

The codes are those of the X/Open XA specification. Source:
docs/metaq-1.4/broker.md 5.4 and 5.5.
"""

import re
from typing import Final

from metaq.client.errors import (
    ExchangeError,
    HeuristicError,
    TransactionRolledBackError,
    UnknownXidError,
    XaError,
    XaProtocolError,
    XaRolledBackError,
)
from metaq.errors import (
    BadReplyError,
    MetaqError,
    NotAnExchangeError,
    ServerError,
    UnroutableError,
)
from metaq.model import MAX_OFFSET, MessageId, XaTransactionId, printable
from metaq.peer.replies import require_ok
from metaq.protocol import texts
from metaq.protocol.commands import Reply
from metaq.protocol.transaction_ids import parse_key

RMERR: Final = -3
NOTA: Final = -4
INVAL: Final = -5
PROTO: Final = -6
RMFAIL: Final = -7
DUPID: Final = -8
HEURHAZ: Final = 8
HEURCOM: Final = 7
HEURRB: Final = 6
HEURMIX: Final = 5
RB_CODES: Final = range(100, 108)

_NAMES: Final = {
    RMERR: "XAER_RMERR", NOTA: "XAER_NOTA", INVAL: "XAER_INVAL", PROTO: "XAER_PROTO",
    RMFAIL: "XAER_RMFAIL", DUPID: "XAER_DUPID", HEURHAZ: "XA_HEURHAZ",
    HEURCOM: "XA_HEURCOM", HEURRB: "XA_HEURRB", HEURMIX: "XA_HEURMIX",
    100: "XA_RBROLLBACK", 101: "XA_RBCOMMFAIL", 102: "XA_RBDEADLOCK",
    103: "XA_RBINTEGRITY", 104: "XA_RBOTHER", 105: "XA_RBPROTO", 106: "XA_RBTIMEOUT",
    107: "XA_RBTRANSIENT",
}  # fmt: skip
_KINDS: Final[dict[int, type[XaError]]] = {
    NOTA: UnknownXidError,
    PROTO: XaProtocolError,
    **dict.fromkeys(range(HEURMIX, HEURHAZ + 1), HeuristicError),
    **dict.fromkeys(RB_CODES, XaRolledBackError),
}

_XA: Final = re.compile(r"XAException:code=(-?[0-9]{1,9}),msg=(.*)", re.DOTALL)
# Replies to puts have no code.
_BARE: Final = (
    (re.compile(r"XA transaction '.*' has not been started\."), NOTA),
    (re.compile(r"XA transaction '.*' has been heuristically committed\."), HEURCOM),
    (re.compile(r"XA transaction '.*' has been heuristically rolled back\."), HEURRB),
    (re.compile(r"XA transaction '.*' has been heuristically completed\."), HEURHAZ),
)
_NOT_STARTED: Final = re.compile(r"Local transaction '.*' has not been started\.")
_RECEIPT: Final = re.compile(
    "(-?[0-9]{1,19}) ([0-9]{1,10}) -1(?: routed=([0-9]{1,10}))?"
)
_COMMITTED: Final = "0"
_VOTES: Final = {"0": True, "3": False}


def require_done(reply: Reply, where: str) -> str:
    """Return the text of a reply with status 200.

    Args:
        reply: to a transaction command, or to a put of a transaction.
        where: name of the broker, for errors.

    Raises:
        XaError: of the class for its code.
        TransactionRolledBackError: the broker no longer knows the local transaction.
        ExchangeError: the exchange of a put was deleted.
        WireError, UnexpectedReplyError: any other refusal.
    """
    try:
        return require_ok(reply).text
    except NotAnExchangeError as error:
        raise ExchangeError(f"{where}: {error}") from None
    except ServerError as error:
        raise _error_of(str(error), where) or error from None


def _error_of(text: str, where: str) -> MetaqError | None:
    found = _XA.fullmatch(text)
    if found is not None:
        return _xa_error(int(found[1]), found[2], where)
    if _NOT_STARTED.fullmatch(text):
        return TransactionRolledBackError(
            f"{where}: {text} It was rolled back when its time was over"
        )
    codes = (code for bare, code in _BARE if bare.fullmatch(text))
    code = next(codes, None)
    return None if code is None else _xa_error(code, text, where)


def _xa_error(code: int, text: str, where: str) -> XaError:
    kind, name = _KINDS.get(code, XaError), _NAMES.get(code, "XA error")
    shown = printable(text)
    return kind(f"{where}: {name} ({code}): {shown}", code=code, text=shown)


def parse_pending(reply: Reply, partition: int, where: str) -> MessageId:
    """Return the id of a message that a transaction holds; it has no offset yet.

    Raises:
        BadReplyError: a 200 that is not a receipt of a put in a transaction.
        UnroutableError: it was put to an exchange, and no binding matched.
        MetaqError: as `require_done`.
    """
    text = require_done(reply, where)
    found = _RECEIPT.fullmatch(text)
    if found is None or int(found[2]) != partition or abs(int(found[1])) > MAX_OFFSET:
        raise BadReplyError(
            f"{where}: put: expected 'id {partition} -1', got {text[:80]!r}"
        )
    if found[3] == "0":
        raise UnroutableError(f"{where}: {texts.UNROUTED}")
    return MessageId(int(found[1]))


def parse_vote(reply: Reply, where: str) -> bool:
    """Return whether a prepared transaction has anything to commit.

    Raises:
        BadReplyError: a 200 that is not a vote.
        MetaqError: as `require_done`.
    """
    text = require_done(reply, where)
    if text not in _VOTES:
        raise BadReplyError(f"{where}: prepare: expected 0 or 3, got {text[:80]!r}")
    return _VOTES[text]


def parse_outcomes(reply: Reply, count: int, where: str) -> list[MetaqError | None]:
    """Return the outcome of each of `count` commits: None if committed, or an error.

    Raises:
        BadReplyError: a 200 without exactly `count` lines.
        MetaqError: as `require_done`; nothing was committed.
    """
    lines = require_done(reply, where).split("\r\n")
    if len(lines) != count:
        raise BadReplyError(f"{where}: expected {count} outcomes, got {len(lines)}")
    return [
        None if line == _COMMITTED else _error_of(line, where) or ServerError(line)
        for line in lines
    ]


def parse_prepared(reply: Reply, where: str) -> tuple[XaTransactionId, ...]:
    """Return the transactions that a broker lists, in its order.

    Raises:
        RemoteProtocolError: a listed key is not that of an XA transaction.
        MetaqError: as `require_done`.
    """
    found = []
    for key in filter(None, require_done(reply, where).split("\r\n")):
        transaction = parse_key(key)
        if not isinstance(transaction, XaTransactionId):
            raise BadReplyError(f"{where}: recover: expected XIDs, got {key[:80]!r}")
        found.append(transaction)
    return tuple(found)
