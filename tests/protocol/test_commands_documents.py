"""The examples in README and docs/protocol.md are read by the code they describe."""

import re
from codecs import escape_decode
from pathlib import Path

import pytest

from metaq.model import MessageId
from metaq.protocol import commands, connection
from metaq.protocol.commands import Mput, Status
from metaq.protocol.connection import Connection, Event, Role, WireLimits
from metaq.protocol.version import decode_version_body
from metaq.record.checksum import checksum
from tests.record.stamping import check_and_stamp
from tests.rigs.pair import drain

ROOT = Path(__file__).parents[2]
README = (ROOT / "metaq" / "protocol" / "README.md").read_text()
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()

ROWS = re.findall(r"^\| `(\w+)` \| `.*\| `(.*)` \|$", README, re.MULTILINE)
TALK = re.findall(r"^    ([<>]) (.*)$", DOCUMENT, re.MULTILINE)


def read(role: Role, text: str) -> Event:
    conn = Connection(role, WireLimits())
    conn.receive_data(escape_decode(text.encode())[0])
    (event,) = drain(conn)
    assert conn.buffer.unread_bytes == 0
    return event


def test_the_grammar_table_has_a_row_for_every_value() -> None:
    """A command without a row would be undocumented."""
    union = {*commands.Command.__args__, *commands.Reply.__args__}
    assert sorted(cls.__name__ for cls in union) == sorted(name for name, _ in ROWS)


@pytest.mark.parametrize(("name", "example"), ROWS)
def test_the_examples_of_the_table_decode(name: str, example: str) -> None:
    """Each to the value that its row names."""
    role = Role.CLIENT if name in ("Result", "Value") else Role.SERVER
    assert type(read(role, example)).__name__ == name


@pytest.mark.parametrize(("direction", "line"), TALK)
def test_the_examples_of_the_document_decode(direction: str, line: str) -> None:
    """Each line is one whole frame."""
    event = read(Role.SERVER if direction == ">" else Role.CLIENT, line)
    if isinstance(event, Mput):
        assert checksum(event.payload) == event.checksum
        buffer = bytearray(event.payload)
        assert check_and_stamp(buffer, event.count, MessageId(1)) is None


def test_the_capabilities_example_is_readable() -> None:
    """The body in the document announces everything."""
    (body,) = re.findall(r"(metaq/1\.0;.*)$", DOCUMENT, re.MULTILINE)
    found = decode_version_body(body)
    assert found.has_mput
    assert found.spans
    assert found.dedup
    assert found.mput_tx
    assert found.together
    assert found.check
    assert found.follow
    assert (found.wait_ms_max, found.payload_bytes_max) == (30000, 16777216)
    assert (found.batch_bytes_max, found.batch_records_max) == (8388608, 65536)


def test_the_default_limits_are_those_of_the_document() -> None:
    """Numbers in prose drift unless a test looks."""
    limits = WireLimits()
    assert f"| {limits.line_bytes_max >> 10} KiB |" in DOCUMENT
    for size in (limits.payload_bytes_max, limits.batch_bytes_max):
        assert f"| {size >> 20} MiB |" in DOCUMENT
    assert f"| {connection.REPLY_BYTES_MAX >> 20} MiB |" in DOCUMENT
    assert f"| {limits.follow_bytes_max >> 20} MiB, not a key |" in DOCUMENT


def test_the_status_table_is_complete() -> None:
    """Every number of the enum is mentioned."""
    for status in Status:
        assert re.search(rf"\b{status.value}\b", DOCUMENT)
