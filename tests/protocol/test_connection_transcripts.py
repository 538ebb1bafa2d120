"""Runs tests/transcripts/protocol: bytes in, events out, as text.

In a block, `server` or `client` on a line of its own starts a connection of that role;
each other input line is one piece as a socket gives it, with Python's escapes. The
output is one line per event, and a last line when the talk does not end between two
frames: `waiting` inside one, `closed: ...` after a breach.
"""

from codecs import escape_decode
from pathlib import Path

import pytest

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import Quit
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from tests.rigs.transcript import check_transcript

FILES = sorted((Path(__file__).parents[1] / "transcripts" / "protocol").glob("*.txt"))
LIMITS = WireLimits(
    line_bytes_max=200, payload_bytes_max=64, batch_bytes_max=64, reply_bytes_max=64
)


def execute(lines: list[str]) -> list[str]:
    role, *pieces = lines
    conn, output = Connection(Role(role), LIMITS), []
    try:
        for piece in pieces:
            conn.receive_data(escape_decode(piece.encode())[0])
            while (event := conn.next_event()) is not NEED_DATA:
                output.append(str(event))
    except RemoteProtocolError as error:
        return [*output, f"closed: {error}"]
    has_quit = str(Quit()) in output
    if (not conn.is_between_frames and not has_quit) or conn.buffer.unread_bytes:
        output.append("waiting")
    return output or ["nothing"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcripts_hold(path: Path) -> None:
    """Every block gives the output that the file shows."""
    check_transcript(path, execute)


def test_there_are_transcripts_for_every_section() -> None:
    """An empty directory would pass silently."""
    assert {path.stem for path in FILES} >= {
        "framing", "put", "get", "offset", "version_stats_quit", "transaction",
        "sync", "mput", "replies", "limits",
    }  # fmt: skip
