"""Hypothesis strategies: commands, replies, records, and splits of bytes."""

from collections.abc import Callable
from typing import get_args, get_type_hints

from hypothesis import strategies as st

from metaq.model import (
    NULL_TRANSACTION,
    LocalTransactionId,
    MessageId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.commands import (
    NO_NEXT,
    OWN_TIMES,
    Command,
    CommitTogether,
    CountQuestion,
    ListScheduled,
    Mput,
    Put,
    Question,
    Quit,
    Reply,
    Result,
    Settle,
    SplitQuestion,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Value,
)
from metaq.protocol.decimals import I32_MAX, I32_MIN, I64_MAX, I64_MIN
from metaq.record.layout import encode_record

NAMES = st.text(
    st.characters(exclude_characters=" \r\n", exclude_categories=["Cs"]), min_size=1
)
"""Tokens that `encode` accepts: topics, groups, sessions."""

KEY_PARTS = st.text(
    st.characters(exclude_characters=" \r\n:", exclude_categories=["Cs", "Z", "C"]),
    min_size=1,
)
"""Parts of a transaction key."""

I32 = st.integers(I32_MIN, I32_MAX)
I64 = st.integers(I64_MIN, I64_MAX)
COUNTS = st.integers(0, I32_MAX)
TIMES = st.none() | st.integers(OWN_TIMES, I64_MAX)
PAYLOADS = st.binary(max_size=200)


def transaction_ids() -> st.SearchStrategy[TransactionId]:
    """Ids of all three kinds."""
    return st.one_of(
        st.builds(LocalTransactionId, KEY_PARTS, I32),
        st.builds(
            XaTransactionId,
            I32,
            st.binary(max_size=8),
            st.binary(max_size=8),
            KEY_PARTS,
        ),
        st.just(NULL_TRANSACTION),
    )


def puts() -> st.SearchStrategy[Put]:
    """Puts, inside and outside of transactions."""
    transactions = st.none() | transaction_ids()
    return st.builds(Put, NAMES, I32, PAYLOADS, I32, I32, I32, transactions)


def mputs() -> st.SearchStrategy[Mput]:
    """Batches with and without producer or transaction; payloads are not records."""
    producers = st.from_regex(r"[A-Za-z0-9._~-]{1,64}", fullmatch=True)
    fields = (NAMES, I32, COUNTS, I32, I32, PAYLOADS)
    return st.builds(
        Mput, *fields, transaction=st.none() | transaction_ids(), deliver_ms=TIMES
    ) | st.builds(
        Mput,
        *fields,
        producers.filter(lambda name: name != "-"),
        st.integers(0, 2**63 - 1),
        deliver_ms=TIMES,
    )


def transaction_commands() -> st.SearchStrategy[TransactionCommand]:
    """Transaction commands of every type and shape."""
    return st.builds(
        TransactionCommand,
        transaction_ids(),
        NAMES,
        st.sampled_from(TransactionType),
        I32,
        COUNTS,
        st.none() | NAMES | st.just("12345"),
    )


def questions() -> st.SearchStrategy[Question]:
    """Queries that an offset query may carry."""
    numbers = st.integers(0, I64_MAX)
    return st.one_of(
        st.builds(TimeQuestion, numbers),
        st.builds(CountQuestion, numbers),
        st.builds(SplitQuestion, numbers, COUNTS),
    )


BY_TYPE: dict[object, st.SearchStrategy[object]] = {
    int: I32,
    tuple[int, ...]: st.lists(I32, max_size=3).map(tuple),
    str: NAMES,
    bytes: PAYLOADS,
    Question | None: st.none() | questions(),
    str | None: st.none() | st.text(st.characters(exclude_categories=["Cs"])),
}
WORKERS = st.from_regex(r"[A-Za-z0-9._~-]{1,8}", fullmatch=True).filter("-".__ne__)
GENERATIONS = st.none() | st.integers(0, I64_MAX)

BY_NAME: dict[str, st.SearchStrategy[object]] = {
    "offset": I64,
    "message_id": I64,
    "wait_ms": COUNTS,
    "item": NAMES | st.just(""),
    "lease_ms": COUNTS,
    "worker": WORKERS,
    "generation": GENERATIONS,
    "below": st.integers(0, I64_MAX),
    "since_ms": st.integers(0, I64_MAX),
    "until_ms": st.integers(0, I64_MAX),
    "limit": COUNTS,
    "mailbox": st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    "correlation": st.integers(0, I64_MAX),
}
"""Strategies by name of field, where the type is not enough."""

BY_COMMAND: dict[object, st.SearchStrategy[Command]] = {
    Put: puts(),
    Mput: mputs(),
    TransactionCommand: transaction_commands(),
    CommitTogether: st.builds(
        CommitTogether, NAMES, st.integers(1, I32_MAX), I32, PAYLOADS
    ),
    Settle: st.builds(
        Settle,
        NAMES,
        NAMES,
        I32,
        st.integers(1, I32_MAX),
        PAYLOADS,
        I32,
        WORKERS,
        generation=GENERATIONS,
    ),
    ListScheduled: st.builds(
        ListScheduled, NAMES, COUNTS, I32, *[st.integers(0, I64_MAX)] * 2
    ),
}
"""Commands whose fields depend on each other."""


def commands() -> st.SearchStrategy[Command]:
    """Every command except quit, which ends a connection; includes future commands."""
    kinds = [kind for kind in get_args(Command) if kind is not Quit]
    return st.one_of(
        *(BY_COMMAND[kind] if kind in BY_COMMAND else by_fields(kind) for kind in kinds)
    )


def by_fields(kind: Callable[..., Command]) -> st.SearchStrategy[Command]:
    """Commands whose fields are independent."""
    types = get_type_hints(kind)
    fields = {n: BY_NAME[n] if n in BY_NAME else BY_TYPE[types[n]] for n in types}
    return st.builds(kind, **fields)


def quits() -> st.SearchStrategy[Quit]:
    """The command that ends a connection."""
    return st.just(Quit())


def replies() -> st.SearchStrategy[Reply]:
    """Every reply, with any status number."""
    offsets = st.integers(NO_NEXT, I64_MAX)
    values = st.builds(Value, PAYLOADS, I32, offsets, st.integers(0, I64_MAX))
    return st.builds(Result, I32, PAYLOADS, I32) | values


def records() -> st.SearchStrategy[bytes]:
    """The bytes of one record with a valid checksum and an id other than 0."""
    return st.builds(
        lambda payload, number, flag: encode_record(
            payload, id=MessageId(number), flag=flag
        ),
        PAYLOADS,
        st.integers(1, I64_MAX),
        I32,
    )


def segments() -> st.SearchStrategy[bytes]:
    """Bytes of up to eight consecutive records."""
    return st.lists(records(), max_size=8).map(b"".join)


def cuts(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """Splits of `data` into pieces, which joined are `data`."""
    positions = st.lists(st.integers(0, len(data)), max_size=12).map(sorted)
    return positions.map(
        lambda at: [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]
    )
