"""`metaq txn`: what it asks a broker on this machine, and what it prints."""

import json
from pathlib import Path

import pytest

from metaq.cli.transactions import ENDS
from tests.cli.test_admin import ask

KEY = "XID:1:0a:0b:billing-1"
PREPARED = {
    "key": KEY,
    "state": "prepared",
    "put_count": 3,
    "size_bytes": 700,
    "partitions": ["orders-0", "audit-1"],
    "age_ms": 61_000,
    "prepared_age_ms": 60_000,
    "detail": "",
}


def test_list_shows_what_an_operator_decides_by(tmp_path: Path) -> None:
    """Key, state, puts, bytes, both ages and where to; as a table and as JSON."""
    reply = {"ok": True, "transactions": [PREPARED]}
    request, code, output = ask(tmp_path, reply, "txn", "list")
    assert (request["command"], code) == ("transactions", 0)
    for text in (KEY, "prepared", "700", "61 s", "60 s", "orders-0, audit-1"):
        assert text in output
    (tmp_path / "admin.sock").unlink()
    _request, _code, output = ask(tmp_path, reply, "txn", "list", "--json")
    row = json.loads(output)
    assert (row["key"], row["put_count"], row["state"]) == (KEY, 3, "prepared")
    assert (row["age_ms"], row["prepared_age_ms"]) == (61_000, 60_000)
    assert (row["partitions"], row["detail"]) == (["orders-0", "audit-1"], "")


def test_list_says_how_writes_of_spark_are_ended(tmp_path: Path) -> None:
    """Once for each write, and of no other transaction."""
    keys = [
        "XID:1:0a:0b:write-12ab",
        "XID:1:0a:0c:write-12ab",
        "XID:1:0a:0b:sink-9",
        KEY,
    ]
    rows = [{**PREPARED, "key": key} for key in keys]
    reply = {"ok": True, "transactions": rows}
    _request, code, output = ask(tmp_path, reply, "txn", "list")
    assert code == 0
    assert output.count("metaq txn settle") == 2
    for name in ("write-12ab", "sink-9"):
        assert f"  metaq txn settle {name}\n" in output


@pytest.mark.parametrize("word", ENDS)
def test_each_end_is_asked_for_and_told(tmp_path: Path, word: str) -> None:
    """The key and the word go to the broker, and one line says what was done."""
    request, code, output = ask(tmp_path, {"ok": True}, "txn", word, KEY)
    assert request == {"command": "end_transaction", "key": KEY, "as": word}
    assert (code, output) == (0, f"{KEY}: {ENDS[word].done}\n")


def test_what_is_refused_is_one_sentence(tmp_path: Path) -> None:
    """The broker's own words, and a code that scripts can see."""
    reply = {"ok": False, "error": f"transaction '{KEY}' is not prepared: in use"}
    _request, code, output = ask(tmp_path, reply, "txn", "commit", KEY)
    assert code == 1
    assert output == f"metaq: transaction '{KEY}' is not prepared: in use\n"
