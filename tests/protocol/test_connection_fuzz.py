"""Mutated frames: a connection accepts or raises `RemoteProtocolError`, no more.

Memory stays bounded because a connection holds at most a partial line and one payload;
the test counts what is held after each piece, and looks at the process at the end.
"""

import random
import resource

import pytest

from metaq.errors import RemoteProtocolError
from metaq.protocol.commands import Result, Value
from metaq.protocol.connection import NEED_DATA, Connection, Role, WireLimits
from tests.protocol.test_decoding import CANONICAL, SYNONYMS
from tests.sampling import IS_WHOLE

CORPUS = [raw for _, raw in CANONICAL + SYNONYMS]
REPLIES = [raw for value, raw in CANONICAL if isinstance(value, Result | Value)]
COMMANDS = [raw for value, raw in CANONICAL if not isinstance(value, Result | Value)]
LIMITS = WireLimits(
    line_bytes_max=120,
    payload_bytes_max=64,
    batch_bytes_max=64,
    follow_bytes_max=64,
    reply_bytes_max=64,
)
HELD_BYTES_MAX = 120 + 64 + 2
SPICE = [
    b" ", b"  ", b"\r\n", b"\r", b"\n", b"\0", b"-", b"+", b"-1", b"0", b"9" * 30,
    b"2147483647", b"2147483648", b"-2147483648", b"9223372036854775808", b"\xff",
    b"\xe4\xb8", b"put", b"mput", b"value", b"result", b"quit", b"TX:", b"XID:1:2:3:4",
    b"null", b"wait=", b"count=", b"x" * 130,
]  # fmt: skip


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """Change one to three places: cut, repeat, spice, flip, or swap two tokens."""
    for _ in range(rng.randrange(1, 4)):
        position = rng.randrange(len(raw) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            raw = raw[:position] + rng.choice(SPICE) + raw[position:]
        elif kind == 1:
            raw = raw[:position] + raw[position + rng.randrange(1, 8) :]
        elif kind == 2 and position < len(raw):
            flipped = raw[position] ^ (1 << rng.randrange(8))
            raw = raw[:position] + bytes([flipped]) + raw[position + 1 :]
        elif kind == 3:
            raw = raw[:position] + rng.choice(CORPUS)
        elif kind == 4:
            tokens = raw.split(b" ")
            slot = rng.randrange(len(tokens))
            tokens[slot] = rng.choice(SPICE)
            raw = b" ".join(tokens)
        else:
            raw = raw[position:] + raw[:position]
    return raw


def feed(conn: Connection, raw: bytes) -> int:
    """Feed one case; return how many events it gave."""
    conn.receive_data(raw)
    events = 0
    while conn.next_event() is not NEED_DATA:
        events += 1
    assert conn.buffer.unread_bytes <= HELD_BYTES_MAX
    return events


def run_cases(count: int, seed: int) -> tuple[int, int]:
    """Run `count` cases; return (events, breaches). A case may go on where the last
    one ended, so connections are met in every state."""
    rng = random.Random(seed)
    events = breaches = 0
    conns = {role: Connection(role, LIMITS) for role in Role}
    roles = [Role.SERVER, Role.SERVER, Role.CLIENT]
    for number in range(count):
        role = roles[number % 3]
        corpus = REPLIES if role is Role.CLIENT else COMMANDS
        raw = rng.choice(corpus if number % 8 else CORPUS)
        raw = mutate(rng, raw) if number % 7 else raw
        try:
            events += feed(conns[role], raw)
        except RemoteProtocolError:
            breaches += 1
            conns[role] = Connection(role, LIMITS)
        else:
            if not number % 5:
                conns[role] = Connection(role, LIMITS)
    return events, breaches


def test_a_few_thousand_malformed_frames_break_nothing() -> None:
    """A sample of the long run, for every change."""
    events, breaches = run_cases(4000, seed=1)
    assert events > 500
    assert breaches > 500


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_malformed_frames_break_nothing(seed: int) -> None:
    """Nothing but `RemoteProtocolError`, and the process does not grow.

    A run feeds other ones each time, a whole one a million.
    """
    count = 1_000_000 if IS_WHOLE else 100_000
    run_cases(20_000, seed=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    events, breaches = run_cases(count, seed)
    assert events > count // 10
    assert breaches > count // 10
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 8 * 1024
