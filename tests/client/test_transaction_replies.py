"""Replies to transaction commands: codes, votes, lists and lines."""

import pytest

from metaq.client import (
    HeuristicError,
    TransactionRolledBackError,
    UnknownXidError,
    XaTransactionId,
)
from metaq.client.errors import XaError, XaProtocolError, XaRolledBackError
from metaq.client.produce.transaction_replies import (
    parse_outcomes,
    parse_pending,
    parse_prepared,
    parse_vote,
    require_done,
)
from metaq.errors import BadReplyError, ServerError
from metaq.protocol.commands import Result
from tests.protocol.golden import reply_text


def refused(text: str) -> Result:
    return Result(500, text.encode(), 1)


@pytest.mark.parametrize(
    ("text", "kind", "code", "named"),
    [
        (reply_text("transactions", "xa commit again"), UnknownXidError, -4, "NOTA"),
        (reply_text("transactions", "xa prepare again"), XaProtocolError, -6, "PROTO"),
        (reply_text("transactions", "local prepare"), XaError, -3, "RMERR"),
        ("XAException:code=104,msg=STORE", XaRolledBackError, 104, "RBOTHER"),
        ("XAException:code=5,msg=mixed", HeuristicError, 5, "HEURMIX"),
        ("XAException:code=-77,msg=x\x1b[2J", XaError, -77, "XA error"),
        ("XA transaction 'XID:1' has not been started.", UnknownXidError, -4, "NOTA"),
    ],
)
def test_codes_become_classes(
    text: str, kind: type[XaError], code: int, named: str
) -> None:
    """Of what was recorded, and of what MetaQ words; the terminal gets no commands."""
    with pytest.raises(XaError, match=named) as caught:
        require_done(refused(text), "broker 7")
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert str(caught.value).startswith("broker 7: ")
    assert caught.value.text.isprintable()


def test_a_local_transaction_that_is_gone_was_rolled_back() -> None:
    text = reply_text("transactions", "local commit after timeout")
    with pytest.raises(TransactionRolledBackError, match="has not been started"):
        require_done(refused(text), "broker 7")


@pytest.mark.parametrize(
    "body", [b"", b"1", b"5 0", b"5 0 7", b"5 1 -1", b"x 0 -1", b"9" * 19 + b" 0 -1"]
)
def test_what_is_no_receipt_of_a_transaction_is_not_believed(body: bytes) -> None:
    with pytest.raises(BadReplyError):
        parse_pending(Result(200, body, 1), 0, "broker 7")


def test_votes_and_lists_are_read_as_recorded() -> None:
    listed = reply_text("transactions", "xa recover null key")
    (xid,) = parse_prepared(Result(200, listed.encode(), 1), "b")
    assert xid == XaTransactionId(100, b"gtrid-2", b"bq-2", "uq-1")
    assert parse_prepared(Result(200, b"", 1), "b") == ()
    assert parse_vote(Result(200, b"0", 1), "b") is True
    assert parse_vote(Result(200, b"3", 1), "b") is False
    for wrong in (b"", b"1", b"00"):
        with pytest.raises(BadReplyError):
            parse_vote(Result(200, wrong, 1), "b")
    with pytest.raises(BadReplyError, match="expected XIDs"):
        parse_prepared(Result(200, b"TX:s:1", 1), "b")


def test_outcomes_of_several_commits_are_read_line_by_line() -> None:
    """Each as the answer to its commit alone would be; their number has to fit."""
    lines = b"0\r\nXAException:code=-4,msg=gone\r\nXAException:code=7,msg=\r\nno"
    found = parse_outcomes(Result(200, lines, 1), 4, "b")
    assert found[0] is None
    kinds = (UnknownXidError, HeuristicError, ServerError)
    assert [type(error) for error in found[1:]] == [*kinds]
    for count in (3, 5):
        with pytest.raises(BadReplyError, match=f"expected {count} outcomes, got 4"):
            parse_outcomes(Result(200, lines, 1), count, "b")
    with pytest.raises(ServerError, match="offline"):
        parse_outcomes(Result(500, b"transactions are offline", 1), 2, "b")
