"""The text of a retention policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.config.keys import read_delete_policy
from metaq.config.settings import DeleteKind, DeletePolicy

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("text", "kind", "age_ms", "is_compressed"),
    [
        ("delete,168", DeleteKind.DELETE, 168 * HOUR_MS, False),
        ("delete,12h", DeleteKind.DELETE, 12 * HOUR_MS, False),
        ("delete, 90m", DeleteKind.DELETE, 90 * 60_000, False),
        ("delete,30s", DeleteKind.DELETE, 30_000, False),
        ("delete,0", DeleteKind.DELETE, 0, False),
        ("archive,3", DeleteKind.ARCHIVE, 3 * HOUR_MS, False),
        ("archive,3,true", DeleteKind.ARCHIVE, 3 * HOUR_MS, True),
        ("archive,12h,TRUE", DeleteKind.ARCHIVE, 12 * HOUR_MS, True),
        ("archive,12h,false", DeleteKind.ARCHIVE, 12 * HOUR_MS, False),
    ],
)
def test_a_policy_has_a_kind_an_age_and_a_compression(
    text: str, kind: DeleteKind, age_ms: int, is_compressed: bool
) -> None:
    """Ages are hours unless a suffix says seconds or minutes."""
    assert read_delete_policy(text) == DeletePolicy(kind, age_ms, is_compressed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "delete,168h or archive,168h .*, got ''"),
        ("Delete,1", "delete,168h or archive,168h .*, got 'Delete,1'"),
        ("delete", "delete,168h or archive,168h .*, got 'delete'"),
        ("delete,", "delete,168h .*, got 'delete,'"),
        ("delete,h", "delete,168h .*, got 'delete,h'"),
        ("delete,-1", "delete,168h .*, got 'delete,-1'"),
        ("delete,1d", r"minutes \(90m\) or seconds \(30s\), got 'delete,1d'"),
        ("delete,1.5h", "got 'delete,1.5h'"),
        ("delete,٣", "got 'delete,٣'"),
        ("keep", "delete,168h or archive,168h .*, got 'keep'"),
        ("delete,878401h", "at most a century"),
        ("delete,999999h", "at most a century"),
        ("delete," + "9" * 5000, "with an age in hours"),
        ("delete,1,true", "archive,168h,true, .*, got 'delete,1,true'"),
        ("archive,1,true,x", "archive,168h,true, .*, got 'archive,1,true,x'"),
        ("archive,1,yes", "archive,168h,true, .*, got 'archive,1,yes'"),
        ("archive,1,", "archive,168h,true, .*, got 'archive,1,'"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_forms_that_exist(
    text: str, message: str
) -> None:
    """The message shows a form to copy, and what was found instead."""
    with pytest.raises(ValueError, match=message):
        read_delete_policy(text)


@given(
    st.sampled_from(DeleteKind),
    st.integers(0, 10**9).map(lambda seconds: seconds * 1000),
    st.booleans(),
)
def test_the_text_form_reads_back(kind: DeleteKind, age_ms: int, zipped: bool) -> None:
    """The text shown to an operator can be pasted into the file."""
    policy = DeletePolicy(kind, age_ms, zipped and kind is DeleteKind.ARCHIVE)
    assert read_delete_policy(str(policy)) == policy
