"""Names and words of the wire that both directions know. Pure."""

import re
from typing import Final

PRODUCER: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}")
"""A producer's name in an `mput`, or a worker's; a single '-' is none."""

NO_PRODUCER: Final = b"-"

MAILBOX: Final = re.compile(r"[0-9a-f]{32}")
"""A mailbox in a `listen` or `answer`."""

TOGETHER: Final = b"COMMIT_TOGETHER"
"""Type of the command that commits several transactions."""

WORDS_REMEMBERED_MAX: Final = 1024
"""Partitions, producers and workers whose words in a command are remembered."""


def parse_producer(word: bytes) -> str | None:
    """Return the name of a producer in an `mput`; None where the word is none."""
    name = word.decode("latin-1")
    return name if word != NO_PRODUCER and PRODUCER.fullmatch(name) else None
