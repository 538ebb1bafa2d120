"""A range of a file in the queue of a channel."""

from metaq.net.file_range import QueuedRange
from tests.net.rig import Range, sorry


def test_a_queued_range_begins_with_all_of_it_unsent() -> None:
    """From its position in the file on, its header before it."""
    item = QueuedRange(Range(b"0123456789", 3, 4), b"head", sorry)
    assert (item.position, item.left_bytes, item.head) == (3, 4, b"head")
    assert not item.is_short
    assert not item.is_warm
    item.file.release()
