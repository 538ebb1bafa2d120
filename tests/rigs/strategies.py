"""Hypothesis strategies: commands, replies, records, and cuts of byte strings."""

from hypothesis import strategies as st

from metaq.model import (
    NULL_TRANSACTION,
    LocalTransactionId,
    MessageId,
    TransactionId,
    XaTransactionId,
)
from metaq.protocol.commands import (
    Command,
    CountQuestion,
    Get,
    Mput,
    OffsetQuery,
    Put,
    Question,
    Quit,
    Reply,
    Result,
    SplitQuestion,
    Stats,
    Sync,
    TimeQuestion,
    TransactionCommand,
    TransactionType,
    Value,
    Version,
)
from metaq.protocol.java import I32_MAX, I32_MIN, I64_MAX, I64_MIN
from metaq.record.layout import encode_record

NAMES = st.text(
    st.characters(exclude_characters=" \r\n", exclude_categories=["Cs"]), min_size=1
)
"""Tokens as encode takes them: topics, groups, sessions."""

KEY_PARTS = st.text(
    st.characters(exclude_characters=" \r\n:", exclude_categories=["Cs", "Z", "C"]),
    min_size=1,
)
"""Parts of a transaction key."""

I32 = st.integers(I32_MIN, I32_MAX)
I64 = st.integers(I64_MIN, I64_MAX)
COUNTS = st.integers(0, I32_MAX)
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
        Mput, *fields, transaction=st.none() | transaction_ids()
    ) | st.builds(
        Mput,
        *fields,
        producers.filter(lambda name: name != "-"),
        st.integers(0, 2**63 - 1),
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


def commands() -> st.SearchStrategy[Command]:
    """Every command but quit, which ends a talk."""
    return st.one_of(
        puts(),
        mputs(),
        st.builds(Get, NAMES, NAMES, I32, I64, I32, I32, COUNTS),
        st.builds(OffsetQuery, NAMES, NAMES, I32, I64, I32, st.none() | questions()),
        st.builds(Version, I32),
        st.builds(Stats, NAMES | st.just(""), I32),
        transaction_commands(),
        st.builds(Sync, NAMES, I32, PAYLOADS, I32, I64, I32, I32),
    )


def quits() -> st.SearchStrategy[Quit]:
    """The one command that ends a talk."""
    return st.just(Quit())


def replies() -> st.SearchStrategy[Reply]:
    """Every reply, with any status number."""
    return st.builds(Result, I32, PAYLOADS, I32) | st.builds(Value, PAYLOADS, I32)


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
    """Bytes of up to eight records, one behind the other."""
    return st.lists(records(), max_size=8).map(b"".join)


def cuts(data: bytes) -> st.SearchStrategy[list[bytes]]:
    """Ways to cut `data` into pieces; joined they give `data` again."""
    positions = st.lists(st.integers(0, len(data)), max_size=12).map(sorted)
    return positions.map(
        lambda at: [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]
    )
