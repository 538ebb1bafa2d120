"""Uniform runs of puts: what is read of them, and what is left to others."""

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.broker.uniform_puts import UNIFORM_MIN, UniformPutReader
from metaq.record.checksum import pack_checksums

PREFIX = b"put test 0 5 0"
COUNT = 4 * UNIFORM_MIN


def frames(payloads: list[bytes], opaques: list[int]) -> bytes:
    return b"".join(
        b"%b %d %d\r\n%b" % (PREFIX, crc32(payload) & 0x7FFFFFFF, opaque, payload)
        for payload, opaque in zip(payloads, opaques, strict=True)
    )


@given(
    puts=st.lists(
        st.tuples(st.binary(min_size=5, max_size=5), st.integers(-(2**31), 2**31 - 1)),
        min_size=UNIFORM_MIN,
        max_size=3 * UNIFORM_MIN,
    ),
    before=st.binary(max_size=9),
    behind=st.sampled_from([b"", b"put test 0 5 0 9", b"put test 0 6 0 1 2\r\nhello!"]),
)
def test_a_uniform_run_is_read_exactly(
    puts: list[tuple[bytes, int]], before: bytes, behind: bytes
) -> None:
    """Any payloads and opaques, anything around: the values, and where the run ends."""
    payloads, opaques = [p for p, _ in puts], [o for _, o in puts]
    raw = frames(payloads, opaques)
    run = UniformPutReader(PREFIX, 5).read(before + raw + behind, len(before), COUNT)
    assert run is not None
    assert run.payloads == payloads
    assert run.opaques == [b"%d" % opaque for opaque in opaques]
    assert run.checksums == pack_checksums(payloads)
    assert run.end == len(before + raw)


@pytest.mark.parametrize("opaque", [1, -(2**31)])
def test_a_uniform_run_ends_at_its_bound(opaque: int) -> None:
    """The next put begins another run, even with the longest numbers."""
    raw = frames([b"hello"] * (UNIFORM_MIN + 5), [opaque] * (UNIFORM_MIN + 5))
    run = UniformPutReader(PREFIX, 5).read(raw, 0, UNIFORM_MIN)
    assert run is not None
    assert run.opaques == [b"%d" % opaque] * UNIFORM_MIN
    assert raw[run.end :] == raw[: 5 * len(raw) // (UNIFORM_MIN + 5)]


UNIFORM = frames([b"hello"] * UNIFORM_MIN, list(range(UNIFORM_MIN)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        UNIFORM[:-1],
        b"x" + UNIFORM,
        UNIFORM.replace(b"put test 0 5", b"put test 1 5"),
        UNIFORM.replace(b" 907060870 9\r", b" 907060871 9\r"),
        # Without checksum, but one that has it.
        UNIFORM.replace(b" 907060870 9\r", b" -1 9\r"),
        UNIFORM.replace(b" 907060870 ", b" -1 ").replace(b" -1 9\r", b" 907060870 9\r"),
        UNIFORM.replace(b" 907060870 ", b" -1 ").replace(b" -1 9\r", b" -2 9\r"),
        UNIFORM.replace(b" 907060870 9\r", b" 0907060870 9\r"),
        UNIFORM.replace(b" 9\r", b" 2147483648\r"),
        UNIFORM.replace(b" 9\r", b" -2147483649\r"),
        UNIFORM.replace(b" 9\r", b" +9\r"),
        UNIFORM.replace(b" 9\r", b" 09\r"),
        UNIFORM.replace(b" 9\r", b" -0\r"),
        UNIFORM.replace(b" 9\r", b" 12345678901\r"),
    ],
)
def test_what_is_odd_is_no_uniform_run(raw: bytes) -> None:
    """Too few, another prefix, a checksum that is wrong or written oddly, an opaque."""
    assert UniformPutReader(PREFIX, 5).read(raw, 0, COUNT) is None


def test_prefixes_are_no_patterns() -> None:
    """A topic with dots stands for itself."""
    raw = UNIFORM.replace(b"put test", b"put t.st")
    assert UniformPutReader(b"put t.st 0 5 0", 5).read(raw, 0, COUNT) is not None
    assert UniformPutReader(b"put t.st 0 5 0", 5).read(UNIFORM, 0, COUNT) is None
