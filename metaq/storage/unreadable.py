"""Files that the disk cannot read, and how to do without a span index that is one.

An index is made of the bytes of its segment. Recovery insists on that of an active
segment: it tells a torn tail from corruption. Every other is done without, which is
told, until the scrub has made it again.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from metaq.errors import DiskError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def is_unreadable(error: DiskError) -> bool:
    """Tell whether it is the disk that cannot read what it has."""
    return error.operation == "read" or error.errno_name == "EIO"


def without_index(read: Callable[[], T], otherwise: T, *, is_told: bool = True) -> T:
    """Return what `read` finds in a span index; `otherwise` if it cannot be read.

    Args:
        read: reads one index and nothing else.
        otherwise: what it would find if there were none.
        is_told: log it; whoever asks again and again says it once.

    Raises:
        StorageError: what `read` raised, where the disk is not at fault.
    """
    try:
        return read()
    except DiskError as error:
        if not is_unreadable(error):
            raise
        if is_told:
            logger.error("going on without a span index: %s", error)
        return otherwise
