"""Names of the wire, which a line may carry."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.protocol.names import MAILBOX, NO_PRODUCER, parse_producer
from tests.cases import for_each


@for_each(
    "word, name",
    [
        (b"host-1", "host-1"),
        (b"a", "a"),
        (b"x" * 64, "x" * 64),
        (b"x" * 65, None),
        (b"", None),
        (NO_PRODUCER, None),
        (b"--", "--"),
        (b"a b", None),
        (b"caf\xc3\xa9", None),
    ],
)
def test_names_of_producers(word: bytes, name: str | None) -> None:
    """A single '-' says that there is none."""
    assert parse_producer(word) == name


@given(st.binary(max_size=70))
def test_a_name_is_its_word(word: bytes) -> None:
    assert parse_producer(word) in (None, word.decode("latin-1"))


@for_each(
    "name, is_good",
    [
        ("0f" * 16, True),
        ("0F" * 16, False),
        ("0" * 31, False),
        ("0" * 32 + "\n", False),
    ],
)
def test_names_of_mailboxes(name: str, *, is_good: bool) -> None:
    assert bool(MAILBOX.fullmatch(name)) is is_good
