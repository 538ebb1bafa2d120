"""Runs tests/transcripts/broker: bytes over a real socket to a real broker, as text.

One file is one broker. In a block each input line is sent on one new connection of
the block, with Python's escapes; a line that starts with `!` does something else:

    !close TOPIC START END    closes partitions          !open TOPIC    opens them
    !set NAME NUMBER          changes a setting of [system]

The output is what the broker answered to each line, escaped, and `closed` when it
ended the connection. Masked are message ids (`ID`), numbers that differ from run to
run, the length of a reply that holds one of them, and the address (`ADDRESS`).
"""

import asyncio
import re
from codecs import escape_decode
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.broker.app import Broker
from tests.rigs.broker import Peer, running_broker
from tests.rigs.transcript import check_transcript

FILES = sorted((Path(__file__).parents[1] / "transcripts" / "broker").glob("*.txt"))

MASKS = (
    (rb"(result 200 )\d+( -?\d+\r\n)\d{19}( \d+ -?\d+)", rb"\1N\2ID\3"),
    (rb"(result \d+ )\d+( -?\d+\r\nPut message to \[broker )'meta:[^']+'",
     rb"\1N\2'ADDRESS'"),
    (rb"(result 200 )\d+( -?\d+\r\nSTATS)", rb"\1N\2"),
    (rb"(\r\n(?:pid|port|uptime|threads|config_checksum)) \d+", rb"\1 N"),
    (rb"(\r\nversion) [\w.]+", rb"\1 VERSION"),
    (rb"Count/Duration=[\w.]+,Duration=\d+", rb"Count/Duration=R,Duration=N"),
    (rb"(result 200 )\d+( -?\d+\r\nmetaq/)[\w.]+", rb"\1N\2VERSION"),
)  # fmt: skip
RECORD = re.compile(
    rb"(\x00\x00..[\x00-\x7f]...)[\x10-\x20]......(?:.)(?=[\x00\xff]...)", re.DOTALL
)


def mask(raw: bytes) -> str:
    for pattern, by in MASKS:
        raw = re.sub(pattern, by, raw)
    if raw.startswith(b"value "):
        raw = RECORD.sub(rb"\1[--ID--]", raw)
    return repr(raw)[2:-1]


def change(broker: Broker, line: str) -> None:
    word, *rest = line[1:].split()
    context = broker.context
    match word, rest:
        case "close", [topic, start, end]:
            context.topics.close_partitions(topic, start=int(start), end=int(end))
        case "open", [topic]:
            context.topics.open_partitions(topic, start=0, end=None)
        case "set", [name, number]:
            system = replace(context.config.system, **{name: int(number)})
            context.config = replace(context.config, system=system)
        case _:
            raise AssertionError(line)


async def run_block(broker: Broker, lines: list[str]) -> list[str]:
    output = []
    async with Peer(broker) as peer:
        for line in lines:
            if line.startswith("!"):
                change(broker, line)
                continue
            answer = await peer.ask(escape_decode(line.encode())[0])
            output.append(mask(answer) if answer else "(nothing)")
        if peer.is_closed():
            output.append("closed")
    return output


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_broker_behaves_as_written(path: Path, tmp_path: Path) -> None:
    """Every block of the transcript gives the lines that the file says."""
    with asyncio.Runner() as runner:
        running = running_broker(tmp_path / "data")
        broker = runner.run(running.__aenter__())
        try:
            check_transcript(path, lambda lines: runner.run(run_block(broker, lines)))
        finally:
            runner.run(running.__aexit__(None, None, None))


def test_there_are_transcripts() -> None:
    """The parametrisation above is not empty."""
    assert len(FILES) >= 8
