"""Dead letters: spooled messages that their broker refused for good, one file each.

    <directory of the spool>/refused/<ms since 1970>-<number in the spool>.json

A file is one JSON object: `topic`, `broker`, `partition`, `attribute`, `data` (null if
it is not UTF-8), `data_base64` (null if it is), `error`, `at_ms`. Files are only
written and counted here; reading and removing them is left to the operator.
"""

import base64
import json
from pathlib import Path
from typing import Final

from metaq.errors import MetaqError, NoSpaceError
from metaq.fs import FileSystem
from metaq.model import Message, Millis

DIRECTORY_NAME: Final = "refused"

SUFFIX: Final = ".json"

REFUSED_FILES_MAX: Final = 10_000
"""Maximum number of files of one spool; at that number its replay stops."""


class DeadLetterFiles:
    """The dead letters of one spool. Owner: the owner of the spool.

    Concurrency: one call at a time; all but `count` block on the disk.
    """

    def __init__(
        self, fs: FileSystem, spool_directory: Path, count_max: int = REFUSED_FILES_MAX
    ) -> None:
        """Prepare; the directory is created with the first message.

        Args:
            fs: the disk.
            spool_directory: directory of the spool, which is open.
            count_max: maximum number of files.
        """
        self.directory: Final = spool_directory / DIRECTORY_NAME
        self.count = 0
        """Number of files: found by the last `recount`, and written since."""
        self._fs = fs
        self._count_max = count_max

    def recount(self) -> None:
        """Count the files left by earlier processes.

        Raises:
            StorageError: the disk refuses.
        """
        if self._fs.is_directory(self.directory):
            names = self._fs.list_directory(self.directory)
            self.count = sum(name.endswith(SUFFIX) for name in names)

    def keep(
        self, message: Message, number: int, error: MetaqError, at_ms: Millis
    ) -> Path:
        """Write a message to a file; it is on disk when this returns.

        Args:
            message: the refused message.
            number: its number in the spool.
            error: reason of the refusal.
            at_ms: time of the refusal, ms since 1970.

        Returns:
            Path of the file.

        Raises:
            NoSpaceError: the disk is full, or there are `count_max` files.
            StorageError: the disk refuses.
        """
        if self.count >= self._count_max:
            self.recount()
        if self.count >= self._count_max:
            raise NoSpaceError(
                f"{self.count} refused messages are in {self.directory}, expected less"
                f" than {self._count_max}: move them away"
            )
        self._fs.make_directory(self.directory)
        path = self.directory / f"{at_ms}-{number}{SUFFIX}"
        self._fs.write_atomically(path, encode_refused(message, error, at_ms))
        self.count += 1
        return path


def encode_refused(message: Message, error: MetaqError, at_ms: Millis) -> bytes:
    """Return the content of a message's file: one line of JSON in ASCII."""
    try:
        text, coded = message.data.decode(), None
    except UnicodeDecodeError:
        text, coded = None, base64.b64encode(message.data).decode()
    fields = {
        "topic": message.topic,
        "broker": message.partition.broker_id,
        "partition": message.partition.partition,
        "attribute": message.attribute,
        "data": text,
        "data_base64": coded,
        "error": str(error),
        "at_ms": at_ms,
    }
    return json.dumps(fields).encode() + b"\n"
