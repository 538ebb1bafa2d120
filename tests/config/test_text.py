"""MetaQ's ini dialect."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.config.text import CONFIG_BYTES_MAX, parse_sections
from metaq.errors import ConfigError


def parse(text: str) -> dict[str, dict[str, str]]:
    return parse_sections(text.encode(), "s.ini")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("a=1", "a", "1"),
        ("  a = 1  ", "a", "1"),
        ("a:1", "a", "1"),
        ("zk.zkConnect=h1:2181,h2:2181", "zk.zkConnect", "h1:2181,h2:2181"),
        ("zk.zkConnect: h1:2181", "zk.zkConnect", "h1:2181"),
        ("deleteWhen=0 0 6,18 * * ?", "deleteWhen", "0 0 6,18 * * ?"),
        ("deleteWhen=0 0 6 ? * 6#3", "deleteWhen", "0 0 6 ? * 6#3"),
        ("a=1 ; not a comment", "a", "1 ; not a comment"),
        ("a=", "a", ""),
        ("a:", "a", ""),
        ("a=b=c", "a", "b=c"),
        ('a=\'"x"', "a", '\'"x"'),
        ('a="quoted"', "a", '"quoted"'),
        ("a='''", "a", "'''"),
        ("a=%41%(b)s${c}", "a", "%41%(b)s${c}"),
        ("a=主题", "a", "主题"),
        ("group.g-1=com.example.Filter", "group.g-1", "com.example.Filter"),
        ("a=x\u2028y", "a", "x\u2028y"),
    ],
)
def test_a_setting_is_read_as_metaq_reads_it(line: str, key: str, value: str) -> None:
    """The first = or : separates; values keep commas, quotes, # and ;."""
    assert parse(f"[s]\n{line}\n") == {"s": {key: value}}


@pytest.mark.parametrize(
    "name", ["topic=test", "topic=a-b", "topic=wild-*", "topic=!@#$%", "q\"'", "主题"]
)
def test_a_section_name_is_taken_literally(name: str) -> None:
    """Section names carry topics with any characters."""
    assert parse(f"[{name}]") == {name: {}}
    assert parse(f"  [ {name} ]  ") == {name: {}}


def test_comment_lines_start_with_semicolon_or_hash() -> None:
    """Comments and blank lines say nothing."""
    assert parse("; a=1\n# b=2\n\n  ;c\n[s]\n#d=1\ne=2\n;") == {"s": {"e": "2"}}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_is_understood(end: str) -> None:
    """Files come from Windows as well."""
    assert parse(f"[s]{end}a=1{end}[t]{end}b=2") == {"s": {"a": "1"}, "t": {"b": "2"}}


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    """Editors put one at the head of a UTF-8 file."""
    assert parse_sections(b"\xef\xbb\xbf[s]\na=1", "s.ini") == {"s": {"a": "1"}}


def test_gbk_is_read_when_the_bytes_are_not_utf8() -> None:
    """Comments and values in GBK load."""
    data = "; 服务器配置\n[s]\na=主题\n".encode("gbk")
    assert parse_sections(data, "s.ini") == {"s": {"a": "主题"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=1", "s.ini:1: 'a=1' is before the first section"),
        ("[s]\n\nnonsense", "s.ini:3: expected key=value, got 'nonsense'"),
        ("[s]\n=1", "s.ini:2: expected key=value, got '=1'"),
        ("[s", r"s.ini:1: expected \[section\], got '\[s'"),
        ("[s] ; x", r"s.ini:1: expected \[section\]"),
        ("[]", r"s.ini:1: expected \[section\]"),
        ("[", r"s.ini:1: expected \[section\]"),
        ("[s]\na=1\n; c\na=2", "s.ini:4: 'a=2' occurs twice"),
        ("[s]\n[t]\n[s]", r"s.ini:3: '\[s\]' occurs twice"),
    ],
)
def test_what_is_not_ini_is_refused_with_its_line(text: str, message: str) -> None:
    """The error names file, line and text."""
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_other_encodings_and_huge_files_are_refused() -> None:
    """Bytes that are no text, or too many, are no configuration."""
    with pytest.raises(ConfigError, match=r"s\.ini: the text is neither UTF-8 nor GBK"):
        parse_sections(b"[s]\na=\xff\xff\n", "s.ini")
    with pytest.raises(ConfigError, match="expected at most 1048576 bytes, got 104857"):
        parse_sections(b"#" * (CONFIG_BYTES_MAX + 1), "s.ini")


word = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n", exclude_categories=["Cs"]),
    max_size=12,
).map(str.strip)
key = word.filter(
    lambda text: text and not text.startswith((";", "#", "[")) and not {*"=:"} & {*text}
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.dictionaries(word.filter(bool), st.dictionaries(key, word, max_size=4)))
def test_what_is_written_is_read(sections: dict[str, dict[str, str]]) -> None:
    """Any names and values without a line end survive the way through the file."""
    text = "\n".join(
        line
        for name, pairs in sections.items()
        for line in (f"[{name}]", *(f"{k}={v}" for k, v in pairs.items()))
    )
    assert parse(text) == sections


@given(
    st.one_of(
        st.binary(max_size=80),
        st.lists(
            st.sampled_from(
                [
                    "[",
                    "]",
                    "=",
                    ":",
                    ";",
                    "#",
                    "\n",
                    "\r",
                    '"',
                    "'''",
                    "a",
                    " ",
                    "%",
                    "[",
                ]
            )
        ).map(lambda parts: "".join(parts).encode()),
    )
)
def test_any_bytes_parse_or_raise_config_error(data: bytes) -> None:
    """Foreign bytes cause no other exception."""
    with contextlib.suppress(ConfigError):
        parse_sections(data, "s.ini")
