"""Records of CSV, and lines that match a pattern."""

import csv
import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.pipeline.decode.text_values import CsvValues, PatternValues, group_names
from metaq.spark.errors import OptionError
from tests.pipeline.decode.values import FIELDS, LINE, NOON, csv_values, decoded, row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"1,2024-05-01 12:00:00,x", row(1, NOON, "x")),
        (b'1,2024-05-01T14:00:00+02:00,"x,""y"""', row(1, NOON, 'x,"y"')),
        (b"1,2024-05-01T12:00Z,x\r\n", row(1, NOON, "x")),
        (b'-1,"2024-05-01 12:00:00,000","a\nb"', row(-1, NOON, "a\nb")),
        (b",,", row(None, None, None)),
        (b'"","",""', row(None, None, None)),
        (b"", "expected 3 fields, got 1"),
        (b"1,2", "expected 3 fields, got 2"),
        (b"1,,x,", "expected 3 fields, got 4"),
        (b"x,,", "field a: expected INT, got 'x'"),
        (b"3000000000,,", "field a: expected INT, got '3000000000'"),
        (b" 1,,", "field a: expected INT, got ' 1'"),
        (b"1,yesterday,", "field t: expected TIMESTAMP, got 'yesterday'"),
        (b'1,,"x', "no CSV: unexpected end of data"),
        (b'1,,"x"y', "no CSV: ',' expected after '\"'"),
        (b"1,,x\n2,,y", "no CSV: new-line character seen in unquoted field"),
        (b"1,,\xff", "no UTF-8: byte 3 of 4"),
        (None, None),
    ],
)
def test_csv(text: bytes | None, expected: object) -> None:
    """Among good neighbours, which stay."""
    good = b"7,,z"
    assert decoded(csv_values(), [good, text, good]) == [
        row(7, None, "z"),
        expected,
        row(7, None, "z"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"2024-05-01 12:00:00,000 INFO 5", row(5, NOON, "INFO")),
        (b"2024-05-01 12:00:00Z INFO", row(None, NOON, "INFO")),
        (b"2024-05-01 12:00:00 INFO 5 more", "the pattern does not match"),
        (b"at 2024-05-01 12:00:00 INFO", "the pattern does not match"),
        (b"", "the pattern does not match"),
        (b"a b INFO", "field t: expected TIMESTAMP, got 'a b'"),
        (
            b"2024-05-01 12:00:00 INFO 99999999999",
            "field a: expected INT, got '99999999999'",
        ),
        (b"\xff", "no UTF-8: byte 0 of 1"),
        (None, None),
    ],
)
def test_lines_that_match_a_pattern(text: bytes | None, expected: object) -> None:
    """Groups by their names, in the order of the schema; whole lines."""
    good = b"2024-05-01 12:00:00 WARN 1"
    assert decoded(PatternValues(FIELDS, LINE), [good, text, good]) == [
        row(1, NOON, "WARN"),
        expected,
        row(1, NOON, "WARN"),
    ]


@pytest.mark.parametrize(
    ("regex", "sentence"),
    [
        ("(?P<a>", "missing"),
        ("a", "expected groups .* got none"),
        ("(a)", "unnamed groups"),
        ("(?P<a>x)(?P<a>y)", "a"),
        ("(?P<a>x)(?=y)", "invalid"),
    ],
)
def test_expressions_that_make_no_fields_are_refused(regex: str, sentence: str) -> None:
    """Before the first row."""
    with pytest.raises(OptionError, match=sentence):
        group_names(regex)


def test_schemas_that_do_not_fit_the_format_are_refused() -> None:
    """A pattern has all groups; texts hold no structs; delimiters are characters."""
    nested = pa.struct([("l", pa.list_(pa.int32()))])
    with pytest.raises(OptionError, match="expected the groups t, b, a, got l"):
        PatternValues(nested, LINE)
    with pytest.raises(OptionError, match="field l: text is not read into ARRAY<INT>"):
        csv_values(nested)
    with pytest.raises(OptionError, match="one character, got ';;'"):
        CsvValues(FIELDS, ";;")


@given(st.lists(st.text(max_size=5), min_size=3, max_size=3))
def test_csv_that_is_written_is_read(fields: list[str]) -> None:
    """Whatever is in the fields; an empty one is null."""
    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerow(fields)
    kind = pa.struct([(name, pa.string()) for name in "xyz"])
    try:
        value = out.getvalue().encode()
    except UnicodeEncodeError:
        return
    assert decoded(csv_values(kind), [value]) == [
        dict(zip("xyz", (one or None for one in fields), strict=True))
    ]
