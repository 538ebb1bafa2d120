"""Names and words of the wire that both directions use. Pure."""

import re
from typing import Final

PRODUCER: Final = re.compile(r"[A-Za-z0-9._~-]{1,64}")
"""Name of a producer in an `mput`, or of a worker; a single '-' means none."""

NO_PRODUCER: Final = b"-"

MAILBOX: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a mailbox in a `listen` or `answer`."""

TOGETHER: Final = b"COMMIT_TOGETHER"
"""Type of the command that commits several transactions."""

WORDS_REMEMBERED_MAX: Final = 1024
"""Size of each cache of words in commands: partitions, producers, workers."""


def parse_producer(word: bytes) -> str | None:
    """Return the name of a producer in an `mput`; None if the word is not a name."""
    name = word.decode("latin-1")
    return name if word != NO_PRODUCER and PRODUCER.fullmatch(name) else None
