"""Capabilities of a broker, as sent in the body of its `version` reply.

    metaq/<version>;mput;dedup;spans;codes;mput-tx;together;check;follow;queues
        ;filter;find;exchanges;mailbox;delay-each;wait=<ms>;delay=<ms>
        ;payload=<bytes>;batch=<bytes>,<records>                       (in one line)

MetaQ's clients ignore the body. The body of a MetaQ broker (`1.4.6.3-SNAPSHOT`) lists
nothing, so a client uses none of our extensions with it. Unknown names are ignored, and
unreadable values count as not announced, so that later brokers may announce more.
"""

from dataclasses import dataclass
from typing import Final

from metaq import __version__

SERVER_VERSION: Final = __version__

_PREFIX: Final = "metaq/"
_FIELDS: Final = {
    "mput": "has_mput",
    "dedup": "dedup",
    "spans": "spans",
    "codes": "codes",
    "mput-tx": "mput_tx",
    "together": "together",
    "check": "check",
    "follow": "follow",
    "queues": "queues",
    "filter": "filters",
    "find": "find",
    "exchanges": "exchanges",
    "mailbox": "mailbox",
    "delay-each": "delay_each",
}
"""Word in the body → field of `Capabilities`, in the order of the body."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities that a broker announced; by default none, as with a MetaQ broker.

    A limit of None was not announced: MetaQ has none.
    """

    version: str
    """Server version; for a foreign broker, the whole body."""
    has_mput: bool = False
    wait_ms_max: int = 0
    """Longest wait of a get that the broker accepts, in milliseconds; 0: none."""
    delay_ms_max: int = 0
    """Longest delay of a delayed `mput`, in milliseconds; 0: the broker delays none."""
    payload_bytes_max: int | None = None
    batch_bytes_max: int | None = None
    batch_records_max: int | None = None
    dedup: bool = False
    """The broker recognises a batch that its producer sends again."""
    spans: bool = False
    """The broker answers the questions in an `offset`."""
    codes: bool = False
    """The broker sends codes with refusals (`texts.py`)."""
    mput_tx: bool = False
    """The broker accepts an `mput` in a transaction."""
    together: bool = False
    """The broker commits several transactions in one command."""
    check: bool = False
    """The broker compares stored bytes with their checksums on request: `check`."""
    follow: bool = False
    """The broker is a replica of a set, and accepts messages of the others."""
    queues: bool = False
    """The broker serves queue groups: `take` and `settle`."""
    filters: bool = False
    """The broker accepts a `get` with a filter."""
    find: bool = False
    """The broker finds records by key or header: `find`."""
    exchanges: bool = False
    """The broker routes puts to exchanges."""
    mailbox: bool = False
    """The broker has mailboxes for replies: `listen` and `answer`."""
    delay_each: bool = False
    """The records of an `mput` may have different delivery times."""


def encode_version_body(capabilities: Capabilities) -> str:
    """Return the body of the `version` reply that announces `capabilities`."""
    parts = [_PREFIX + capabilities.version]
    parts += [word for word, name in _FIELDS.items() if getattr(capabilities, name)]
    if capabilities.wait_ms_max:
        parts.append(f"wait={capabilities.wait_ms_max}")
    if capabilities.delay_ms_max:
        parts.append(f"delay={capabilities.delay_ms_max}")
    if capabilities.payload_bytes_max is not None:
        parts.append(f"payload={capabilities.payload_bytes_max}")
    size, records = capabilities.batch_bytes_max, capabilities.batch_records_max
    if size is not None and records is not None:
        parts.append(f"batch={size},{records}")
    return ";".join(parts)


def decode_version_body(body: str) -> Capabilities:
    """Return the capabilities in the body of a `version` reply; never raises."""
    if not body.startswith(_PREFIX):
        return Capabilities(body)
    version, *parts = body.removeprefix(_PREFIX).split(";")
    found = dict(part.partition("=")[::2] for part in parts)
    batch = found.get("batch", "").split(",")
    size, records = map(_number, batch if len(batch) == 2 else ("", ""))
    is_whole = size is not None and records is not None
    return Capabilities(
        version,
        wait_ms_max=_number(found.get("wait", "")) or 0,
        delay_ms_max=_number(found.get("delay", "")) or 0,
        payload_bytes_max=_number(found.get("payload", "")),
        batch_bytes_max=size if is_whole else None,
        batch_records_max=records if is_whole else None,
        **{name: word in found for word, name in _FIELDS.items()},
    )


def _number(text: str) -> int | None:
    """Return a small non-negative number, or None."""
    # 18 digits fit into 64 bits, and bound the time that a hostile body can take.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
