"""Golden bytes of records, checksums and attribute blocks."""

import pytest

from metaq.errors import ConfigError, CorruptRecordError
from metaq.model import MessageId
from metaq.record.checksum import checksum
from metaq.record.flags import decode_payload, encode_payload
from metaq.record.layout import HEADER, HEADER_BYTES, Record, encode_record
from metaq.record.scan import read_record

RECORDS = [
    # (id, attribute, data, bytes):
    # docs/metaq-1.4/broker.md 1.14, docs/metaq-1.4/client.md 3.3
    (1, None, b"hello", "00000005 3610a686 0000000000000001 00000000 68656c6c6f"),
    (
        2,
        "k=v",
        b"hi",
        "00000009 45082c91 0000000000000002 00000001 00000003 6b3d76 6869",
    ),
    (1001, None, b"hello", "00000005 3610a686 00000000000003e9 00000000 68656c6c6f"),
    (
        -7,
        "color=red",
        b"hello",
        (
            "00000012 5f4ca594 fffffffffffffff9 00000001"
            "00000009 636f6c6f723d726564 68656c6c6f"
        ),
    ),
    (
        5,
        "",
        b"hello",
        "00000009 163b4535 0000000000000005 00000001 00000000 68656c6c6f",
    ),
    (6, None, b"", "00000000 00000000 0000000000000006 00000000"),
]


@pytest.mark.parametrize(("id_", "attribute", "data", "golden"), RECORDS)
def test_records_have_the_golden_bytes(
    id_: int, attribute: str | None, data: bytes, golden: str
) -> None:
    """Encoding gives the recorded bytes, and reading them gives the values back."""
    payload, flag = encode_payload(data, attribute)
    raw = encode_record(payload, id=MessageId(id_), flag=flag)
    assert raw == bytes.fromhex(golden)
    record = read_record(raw)
    assert record == Record(MessageId(id_), flag, checksum(payload), payload)
    assert record.size_bytes == len(raw)
    assert decode_payload(record.payload, record.flag)[:2] == (data, attribute)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"hello", 907060870),
        (b"123456789", 1274296614),
        (b"abc", 891568578),
        (b"test", 1484750348),
        (b"\x00\x00\x00\x03k=vhi", 1158163601),
        (b"\x00\x00\x00\x09color=redhello", 1598858644),
        (b"\x00\x00\x00\x00hello", 372983093),
    ],
)
def test_checksums_are_those_of_metaq(data: bytes, expected: int) -> None:
    """CRC-32 with the top bit cleared, over any bytes-like object."""
    assert checksum(data) == expected
    assert checksum(bytearray(data)) == expected
    assert checksum(memoryview(data)) == expected


def test_a_known_checksum_is_not_computed_again() -> None:
    """The caller's checksum is written as it is."""
    raw = encode_record(b"hello", id=MessageId(1), payload_checksum=77)
    assert HEADER.unpack_from(raw) == (5, 77, 1, 0)
    assert len(raw) == HEADER_BYTES + 5


@pytest.mark.parametrize(
    ("payload", "flag", "expected"),
    [
        (b"abc", 0, (b"abc", None)),
        (b"abc", 2, (b"abc", None)),
        (b"\0\0\0\0abc", -1, (b"abc", "")),
        (b"\0\0\0\3abc", 1, (b"", "abc")),
        ("\0\0\0\2ÿz".encode(), 3, (b"z", "ÿ")),
        (b"\0\0\0\1\xffz", 1, (b"z", "�")),
    ],
)
def test_payloads_decode_by_bit_zero(
    payload: bytes, flag: int, expected: tuple[bytes, str | None]
) -> None:
    """Bit 0 announces it, and an attribute that is no UTF-8 stays readable."""
    assert decode_payload(memoryview(payload), flag)[:2] == expected


@pytest.mark.parametrize("payload", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2a"])
def test_a_broken_attribute_block_is_named(payload: bytes) -> None:
    """A block that is cut short or of negative length is corruption, not a crash."""
    with pytest.raises(CorruptRecordError, match="attribute block"):
        decode_payload(payload, 1)


def test_an_attribute_that_is_no_text_is_refused() -> None:
    """Half of a surrogate pair has no bytes; only the sender hears it."""
    with pytest.raises(ConfigError, match="attribute"):
        encode_payload(b"", "\ud800")
