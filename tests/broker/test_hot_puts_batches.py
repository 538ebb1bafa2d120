"""A batch of one message takes a short way when it is received alone."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.broker.hot_puts import HotPuts
from metaq.record.checksum import CHECKSUM_MASK
from metaq.record.layout import HEADER
from tests.broker.test_hot_puts import put, run, run_all


def record(
    payload: bytes = b"hello", *, flag: int = 0, crc: int | None = None
) -> bytes:
    """Return a record as producers write it."""
    known = crc32(payload) & CHECKSUM_MASK if crc is None else crc
    return HEADER.pack(len(payload), known, 0, flag) + payload


def mput(
    records: bytes,
    *,
    topic: str = "test",
    partition: object = 0,
    count: object = 1,
    checksum: object = None,
    producer: str = "maker",
    sequence: object = 0,
    opaque: object = 7,
    length: object = None,
) -> bytes:
    token = crc32(records) & CHECKSUM_MASK if checksum is None else checksum
    size = len(records) if length is None else length
    words = (topic, partition, size, count, token, producer, sequence, opaque)
    return f"mput {' '.join(map(str, words))}\r\n".encode() + records


ORDINARY = st.builds(
    mput,
    st.builds(record, st.binary(max_size=4), flag=st.sampled_from([0, 1, -7])),
    topic=st.sampled_from(["test", "meta-test"]),
    partition=st.sampled_from([0, 1]),
    producer=st.sampled_from(["maker", "other.1"]),
    sequence=st.integers(0, 5),
)
"""Batches of one: new ones, repeated ones, and some whose numbers are used up."""

ODD = [
    mput(record(), partition=-1),
    mput(record(), partition=2),
    mput(record(), partition="00"),
    mput(record(), topic="nosuch"),
    mput(record(), topic="fresh"),
    mput(record(), checksum=-1),
    mput(record(), checksum=1),
    mput(record(), checksum="-2"),
    mput(record(), producer="-", sequence=-1),
    mput(record(), producer="-"),
    mput(record(), producer="a/b"),
    mput(record(), producer="m" * 65),
    mput(record(), producer="\u0663"),
    mput(record(), sequence=-1),
    mput(record(), sequence="007"),
    mput(record(), sequence="+7"),
    mput(record(), sequence=2**63 - 1),
    mput(record(), sequence=2**63),
    mput(record(), opaque="007"),
    mput(record(), opaque="+7"),
    mput(record(), opaque=0),
    mput(record(), opaque=-(2**31)),
    mput(record(), opaque=2**31),
    mput(record(), count=0),
    mput(record(), count=2),
    mput(record(), count="01"),
    mput(record() + record(b"second"), count=2),
    mput(record() + record(b"second")),
    mput(record(crc=5)),
    mput(record() + b"more"),
    mput(record()[:-1]),
    mput(record()[:19]),
    mput(b""),
    mput(record(b"x" * 9000)),
    mput(record(), length="0025"),
    mput(record()) + mput(record(), sequence=1),
    mput(record(), opaque="TX:a:1 7"),
]


@pytest.mark.slow
@settings(max_examples=25)
@given(frames=st.lists(ORDINARY | st.sampled_from(ODD), max_size=30))
def test_batches_received_alone_are_answered_and_stored_the_same(
    frames: list[bytes],
) -> None:
    """Replies, counters and every byte on disk are those of the general path."""
    first = [put(t, p, opaque=p) for t in ("test", "meta-test") for p in (0, 1)]
    with TemporaryDirectory() as directory:
        hot, general = (
            asyncio.run(run(Path(directory) / name, first + frames, is_hot=is_hot))
            for name, is_hot in (("hot", True), ("general", False))
        )
    assert hot == general


@pytest.mark.slow
def test_each_oddity_of_a_batch_is_treated_the_same(tmp_path: Path) -> None:
    """As the first of its producer, and with a batch before; one comes behind."""
    cases = [(frame, before) for frame in ODD for before in ([], [mput(record())])]
    talks = [
        # What a broker knows of a producer is of no other one.
        [piece.replace(b" maker ", b" maker%d " % number) for piece in pieces]
        for number, pieces in enumerate(
            [put(), *before, frame, mput(record(b"next"), sequence=9)]
            for frame, before in cases
        )
    ]
    hot, general = (
        asyncio.run(run_all(tmp_path / name, talks, is_hot=name == "hot"))
        for name in ("hot", "general")
    )
    for case, one, other in zip(cases, hot[0], general[0], strict=True):
        assert one == other, case
    assert hot[1] == general[1]


def test_an_ordinary_batch_of_one_goes_the_short_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first to its partition, whose log is made by the general path."""
    taken, take = [], HotPuts.take_batch

    def note(hot: HotPuts, data: bytes) -> bool:
        taken.append(take(hot, data))
        return taken[-1]

    monkeypatch.setattr(HotPuts, "take_batch", note)
    pieces = [mput(record(), sequence=number) for number in range(3)]
    asyncio.run(run(tmp_path, pieces, is_hot=True))
    assert taken == [False, True, True]
