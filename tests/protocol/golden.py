"""The recorded conversations with a Java broker (tests/golden/vectors.json)."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from metaq.protocol.commands import Result
from metaq.protocol.connection import Connection, Role, WireLimits
from tests.rigs.pair import drain

VECTORS = Path(__file__).parents[1] / "golden" / "vectors.json"


@dataclass(frozen=True)
class Case:
    """One hand-made request and what came back."""

    group: str
    name: str
    request: bytes
    response: bytes | None
    """None where the recording keeps only the ends of a long response."""
    is_closed: bool


@cache
def vectors() -> dict[str, Any]:
    return json.loads(VECTORS.read_text())


def bytes_of(recorded: dict[str, Any]) -> bytes | None:
    """Return recorded bytes; long ones of zeros are rebuilt, others are None."""
    if "hex" in recorded:
        return bytes.fromhex(recorded["hex"])
    head = bytes.fromhex(recorded["head_hex"])
    rebuilt = head + bytes(recorded["len"] - len(head))
    return rebuilt if crc32(rebuilt) == int(recorded["crc32"], 16) else None


@cache
def cases() -> list[Case]:
    found = []
    for group, content in vectors()["cases"].items():
        for case in content["cases"]:
            request = bytes_of(case["request"])
            assert request is not None
            found.append(
                Case(
                    group,
                    case["name"],
                    request,
                    bytes_of(case["response"]),
                    case["connection_closed_by_broker"],
                )
            )
    return found


def reply_text(group: str, name: str) -> str:
    """Return the text of the one `result` that answered a case."""
    (case,) = (c for c in cases() if (c.group, c.name) == (group, name))
    client = Connection(Role.CLIENT, WireLimits())
    assert case.response is not None
    client.receive_data(case.response)
    (reply,) = drain(client)
    assert isinstance(reply, Result)
    return reply.text
