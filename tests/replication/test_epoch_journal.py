"""Entries of a replica's journal: their bytes, and what they add up to."""

import random
from collections.abc import Iterable

import pytest

from metaq.errors import CorruptRecordError
from metaq.model import LogId, Offset
from metaq.replication.epoch_journal import (
    Entry,
    EpochBegun,
    EpochJournal,
    LogCreated,
    LogDeleted,
    TableCut,
    decode_entries,
    encode_entries,
)
from metaq.replication.epochs import Epoch, EpochStart
from tests.cases import for_each
from tests.sampling import examples

LOG = LogId("orders-ü", 3)
E1, E2, E3 = Epoch(1, "a"), Epoch(2, "b"), Epoch(3, "c")
BORN = LogCreated(2**64 - 1, LOG, Offset(40), E1)
NUMBER = BORN.number


def replay(entries: Iterable[Entry]) -> EpochJournal:
    """Return the contents of a journal with these entries."""
    journal = EpochJournal()
    journal.apply(entries)
    return journal


def start(epoch: Epoch, offset: int) -> EpochStart:
    return EpochStart(epoch, Offset(offset))


def begun(epoch: Epoch, offset: int, number: int = NUMBER) -> EpochBegun:
    return EpochBegun(number, epoch, Offset(offset))


def test_the_bytes_of_entries() -> None:
    """Pinned; an epoch that begins in several logs is written once."""
    entries = [
        BORN,
        begun(E2, 9, 7),
        begun(E2, 5, 8),
        TableCut(7, Offset(9)),
        LogDeleted(8),
    ]
    assert encode_entries(entries) == (
        b'[["born",18446744073709551615,"orders-\\u00fc",3,40,1,"a"],'
        b'["begun",2,"b",[[7,9],[8,5]]],["cut",7,9],["gone",8]]'
    )


def any_entry(rng: random.Random) -> Entry:
    number, offset = rng.randrange(1, 4), Offset(rng.randrange(50))
    epoch = rng.choice((E1, E2, E3))
    return rng.choice(
        [
            LogCreated(number, LogId(f"t{number}", 0), offset, epoch),
            EpochBegun(number, epoch, offset),
            EpochBegun(number, epoch, offset),
            TableCut(number, offset),
            LogDeleted(number),
        ]
    )


def test_entries_come_out_as_they_went_in_and_few_say_the_same(
    rng: random.Random,
) -> None:
    """A journal that is written again has the same tables, and every number gone."""
    for _ in range(examples(300)):
        entries = [any_entry(rng) for _ in range(rng.randrange(12))]
        assert decode_entries(encode_entries(entries)) == entries
        journal = replay(entries)
        again = replay(decode_entries(encode_entries(journal.entries())))
        assert again.logs == journal.logs
        assert again.tables == journal.tables
        assert again.gone.keys() == journal.gone.keys()


@for_each(
    "entries, table",
    {
        "born": ([BORN], (start(E1, 40),)),
        "begun": ([BORN, begun(E2, 60)], (start(E1, 40), start(E2, 60))),
        "an epoch without a byte": (
            [BORN, begun(E2, 60), begun(E3, 60)],
            (start(E1, 40), start(E3, 60)),
        ),
        "cut": ([BORN, begun(E2, 60), TableCut(NUMBER, Offset(60))], (start(E1, 40),)),
        "cut, and on as another": (
            [BORN, begun(E2, 60), TableCut(NUMBER, Offset(50)), begun(E3, 50)],
            (start(E1, 40), start(E3, 50)),
        ),
        "born again": (
            [BORN, begun(E2, 60), LogCreated(NUMBER, LOG, Offset(90), E3)],
            (start(E3, 90),),
        ),
        "gone before": ([LogDeleted(NUMBER), BORN], (start(E1, 40),)),
    }.values(),
)
def test_entries_add_up(entries: list[Entry], table: tuple[EpochStart, ...]) -> None:
    """In their order; what is gone and comes again is there."""
    journal = replay(entries)
    assert journal.tables[NUMBER] == table
    assert journal.logs[NUMBER].log_id == LOG
    assert not journal.gone


def test_a_number_that_is_gone_stays_gone() -> None:
    """Its name is known until the journal is written again; its epochs say nothing."""
    journal = replay(
        [BORN, LogDeleted(NUMBER), begun(E2, 60), TableCut(NUMBER, Offset(1))]
    )
    assert not journal.logs
    assert not journal.tables
    assert journal.gone == {NUMBER: LOG}
    assert replay(journal.entries()).gone == {NUMBER: None}


@for_each(
    "body",
    [
        b"",
        b"{",
        b"7",
        b"[[]]",
        b"[7]",
        b'[["later",7]]',
        b'[["gone"]]',
        b'[["gone","7"]]',
        b'[["cut",7]]',
        b'[["born",7,"t",0,0]]',
        b'[["born",7,"t",0,"0",1,"a"]]',
        b'[["begun",1,"a",[7]]]',
        b'[["begun",1,"a",7]]',
        b'[["begun","x","a",[[7,0]]]]',
    ],
)
def test_bytes_that_are_no_entries_are_refused(body: bytes) -> None:
    """A frame is whole by its checksum, so these would be of a later version."""
    with pytest.raises(CorruptRecordError, match="expected those of version 1"):
        decode_entries(body)
