"""Key and headers in front of the attribute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import ConfigError
from metaq.record.flags import (
    FIELDS_MAX,
    Decoded,
    Headers,
    decode_payload,
    encode_keys,
    encode_payload,
    encode_properties,
    has_field,
    split_properties,
)

GOLDEN = [
    (
        Decoded(b"hi", None, b"order-17", ()),
        3,
        b"\0\0\0\x0ckey=order-17hi",
    ),
    (
        Decoded(b"hi", "k=v", b"order-17", (("trace", b"00-4b"),)),
        3,
        b"\0\0\0\x1ekey=order-17&h.trace=00-4b\nk=vhi",
    ),
    (
        Decoded(b"", "", b"", (("a b", b"\xff\n"), ("a b", b""))),
        3,
        b"\0\0\0\x1dkey=&h.a%20b=%FF%0A&h.a%20b=\n",
    ),
    (
        Decoded(b"hi", None, None, (("schlüssel", b"x"),)),
        3,
        b"\0\0\0\x12h.schl%C3%BCssel=xhi",
    ),
    (Decoded(b"hi", "key=order-17", None, ()), 1, b"\0\0\0\x0ckey=order-17hi"),
]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PAIRS = st.lists(st.tuples(TEXTS.filter(bool), st.binary(max_size=20)), max_size=4)


@pytest.mark.parametrize(("decoded", "flag", "payload"), GOLDEN)
def test_messages_have_the_golden_bytes(
    decoded: Decoded, flag: int, payload: bytes
) -> None:
    """These bytes lie in logs: they never change."""
    assert encode_payload(*decoded) == (payload, flag)
    assert decode_payload(payload, flag) == decoded


@given(st.binary(max_size=30), st.none() | TEXTS, st.none() | st.binary(), PAIRS)
def test_messages_read_back(
    data: bytes,
    attribute: str | None,
    key: bytes | None,
    headers: list[tuple[str, bytes]],
) -> None:
    """None, empty and any other key, header and attribute survive."""
    payload, flag = encode_payload(data, attribute, key, headers)
    assert decode_payload(payload, flag) == (data, attribute, key, tuple(headers))


@given(st.lists(st.binary(max_size=12) | TEXTS.map(str.encode)))
def test_keys_of_many_messages_are_encoded_as_those_of_one(keys: list[bytes]) -> None:
    """The quick way writes the same bytes."""
    assert encode_keys(keys) == [encode_payload(b"", key=key)[0] for key in keys]


@given(st.binary(max_size=30), st.none() | TEXTS)
def test_what_has_neither_is_written_as_metaq_writes_it(
    data: bytes, attribute: str | None
) -> None:
    """No byte and no flag more."""
    if attribute is None:
        assert encode_payload(data) == (data, 0)
        return
    text = attribute.encode()
    expected = len(text).to_bytes(4) + text + data
    assert encode_payload(data, attribute) == (expected, 1)


@given(TEXTS, st.none() | st.binary(), PAIRS)
def test_an_attribute_without_the_bit_is_never_misread(
    attribute: str, key: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    """Any text in it, a line of properties included."""
    for text in (attribute, encode_properties(key, headers) + "\n" + attribute):
        payload, flag = encode_payload(b"data", text)
        assert flag == 1
        assert decode_payload(payload, flag) == (b"data", text, None, ())


@given(st.text(alphabet="key=h.&%4A \nx", max_size=12))
def test_a_line_is_read_in_one_way_alone(text: str) -> None:
    """It is written back as it was, or it is no such line."""
    key, headers, attribute = split_properties(text)
    if key is None and not headers:
        assert attribute == text
        return
    line = encode_properties(key, headers)
    read_again = split_properties(line if attribute is None else f"{line}\n{attribute}")
    assert read_again == (key, headers, attribute)


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "k=v", "key", "key=a b", "key=%zz", "key=%0", "key=ä", "h.=x",
        "key=a&", "&key=a", "h.a=1&key=a", "key=a&key=b", "key=a&h.b", "key=a\r\nb",
        "key=%41", "h.%61=x", "h.a=%2D",
    ],
)  # fmt: skip
def test_other_texts_are_attributes(text: str) -> None:
    """A sender of other software that sets the bit loses nothing."""
    payload = len(text.encode()).to_bytes(4) + text.encode() + b"data"
    assert decode_payload(payload, 3) == (b"data", text, None, ())


def test_a_line_has_a_bound() -> None:
    """A broker would read a million headers of one message for seconds, in one turn."""
    most = "&".join(["key=k", *(f"h.{each}=v" for each in range(FIELDS_MAX - 1))])
    key, headers, _attribute = split_properties(most)
    assert (key, len(headers)) == (b"k", FIELDS_MAX - 1)
    assert encode_properties(key, headers) == most
    payload = len(most).to_bytes(4) + most.encode()
    assert has_field(payload, 3, b"h.7=v")
    more = f"{most}&h.x=v"
    assert split_properties(more) == (None, (), more)
    assert not has_field(len(more).to_bytes(4) + more.encode(), 3, b"h.7=v")
    with pytest.raises(ConfigError, match="headers: expected at most 4095, got 4096"):
        encode_payload(b"", headers=[("a", b"")] * FIELDS_MAX)


def test_text_and_its_bytes_are_the_same_key() -> None:
    """A key is bytes; text is written as UTF-8."""
    assert encode_payload(b"", None, "schlüssel") == encode_payload(
        b"", None, "schlüssel".encode()
    )


def test_a_dict_of_headers_keeps_its_order() -> None:
    """Names and values as given."""
    given = {"b": b"1", "a": b"2"}
    payload, flag = encode_payload(b"", headers=given)
    headers = decode_payload(payload, flag).headers
    assert headers == (("b", b"1"), ("a", b"2"))


@pytest.mark.parametrize(
    ("headers", "error", "text"),
    [
        ({"": b"x"}, ConfigError, "name"),
        ({"\ud800": b"x"}, ConfigError, "UTF-8"),
        ({"a": "text"}, TypeError, "'a': expected bytes as value, got str 'text'"),
        ({1: b"x"}, TypeError, "expected str as name, got int 1"),
        ([("a",)], TypeError, "expected a dict of names and bytes"),
        (5, TypeError, "expected a dict of names and bytes"),
        (iter([("a", b"x")]), TypeError, "expected a dict of names and bytes"),
    ],
)
def test_wrong_headers_are_named(
    headers: Headers, error: type[Exception], text: str
) -> None:
    """Each with its name and what it was."""
    with pytest.raises(error, match=text):
        encode_payload(b"", headers=headers)


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ("\ud800", ConfigError, "key .* is no UTF-8"),
        (5, TypeError, "key: expected str or bytes, got int 5"),
    ],
)
def test_a_wrong_key_is_named(key: str, error: type[Exception], text: str) -> None:
    """With what it was."""
    with pytest.raises(error, match=text):
        encode_payload(b"", key=key)
