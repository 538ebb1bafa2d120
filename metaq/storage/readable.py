"""Which bytes one read may have: those of one segment, up to where damage starts. Pure.

Source: broker spec 2.4.
"""

from metaq.errors import CorruptRecordError
from metaq.model import LogId, Offset
from metaq.storage.segment import Damage, Segment
from metaq.storage.segments import Segments


def find_readable(
    log_id: LogId,
    segments: Segments,
    damage: tuple[Damage, ...],
    offset: Offset,
    end: int,
) -> tuple[Segment, Offset]:
    """Return the segment that holds `offset`, and where a read from there ends.

    Args:
        log_id: for the errors.
        segments: of the log.
        damage: damaged ranges, in order of their offsets.
        offset: where the read starts.
        end: where it ends at the latest; above `offset`.

    Raises:
        CorruptRecordError: the byte lies in a damaged range or in a hole between
            segments; the error knows the next good offset.
    """
    for each in damage:
        if each.covers(offset):
            raise CorruptRecordError(
                f"partition {log_id}: {each}", next_good_offset=each.next_good_offset
            )
        if each.offset > offset:
            end = min(end, each.offset)
    segment = segments.find(offset)
    if segment is None:
        following = segments.following(offset)
        raise CorruptRecordError(
            f"partition {log_id}: no segment holds offset {offset}",
            next_good_offset=following.base_offset if following else None,
        )
    if segment is not segments.active:
        end = min(end, segment.end_offset)
    return segment, Offset(end)
