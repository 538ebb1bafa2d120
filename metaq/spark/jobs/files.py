"""Files of one archive, on any file system that Spark can reach.

Spark's own file systems are used, so that an archive may lie on a local disk, on HDFS
or in an object store, under the settings that the session has for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import SparkSession

from metaq.spark.errors import ArchiveError
from metaq.spark.jobs.failures import SPARK_ERRORS, sentence_of

PATTERN_MARKS: Final = frozenset("*?[]{}\\")
"""Spark reads files by patterns, and has no way to write one that is none."""
LOCAL: Final = "file"
"""Scheme of URLs of local disks."""
NO_LINK: Final = (
    "java.nio.file.FileAlreadyExistsException",
    "java.nio.file.FileSystemException",
    "java.lang.UnsupportedOperationException",
)
"""Java's names for: the name is taken, the disk has no links, nor has the system."""
DRAFT: Final = ".draft"
"""Suffix of files that are being written."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is there."""

    path: str
    """Below the root of the archive, steps separated by `/`."""
    size_bytes: int
    """Length of the file, bytes."""


class ArchiveFiles:
    """The files below one directory; paths are relative to it. Lives on the driver.

    Each call raises `ArchiveError` where the file system refuses.
    """

    def __init__(self, spark: SparkSession, root: str) -> None:
        """Find the file system of a path.

        Args:
            spark: Whose settings hold; a session with a driver of its own.
            root: Path or URL of the directory, which need not exist yet.
        """
        if PATTERN_MARKS & frozenset(root):
            marks = "".join(sorted(PATTERN_MARKS))
            raise ArchiveError(
                f"{root}: expected a path without any of {marks}, which Spark takes for"
                " patterns"
            )
        context = spark.sparkContext
        jvm: Any = context._jvm  # noqa: SLF001  # the only way to Spark's file systems
        jsc: Any = context._jsc  # noqa: SLF001  # the same
        self._jvm = jvm
        with _told(root or repr(root)):
            given = jvm.org.apache.hadoop.fs.Path(root)
            self._fs = given.getFileSystem(jsc.hadoopConfiguration())
            self._root = self._fs.makeQualified(given)
        self.root: str = self._root.toString()
        """The directory as a URL."""

    def list_names(self, directory: str) -> list[str]:
        """Return the names in a directory; none where there is no directory."""
        top = self._at(directory)
        with _told(top):
            if not self._fs.exists(top):
                return []
            return sorted(each.getPath().getName() for each in self._fs.listStatus(top))

    def list_files(self, directory: str = "") -> list[StoredFile]:
        """Return all files at any depth, by path; none where there is no directory."""
        top = self._at(directory)
        found = []
        with _told(top):
            if self._fs.exists(top):
                left = self._fs.listFiles(top, True)
                while left.hasNext():
                    status = left.next()
                    path = self._below(status.getPath().toString())
                    found.append(StoredFile(path, status.getLen()))
        return sorted(found, key=lambda file: file.path)

    def read(self, path: str) -> bytes:
        """Return all bytes of a file."""
        with _told(path):
            stream = self._fs.open(self._at(path))
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def create(self, path: str, data: bytes) -> None:
        """Write a new file; it is there as a whole or not at all.

        Who is killed here leaves a file of this name, something and `DRAFT`.

        Raises:
            ArchiveError: It exists, or the file system refused.
        """
        # Its own name, so that two jobs never write to a file that the other will
        # rename.
        draft = f"{path}.{self._jvm.java.util.UUID.randomUUID().toString()}{DRAFT}"
        try:
            with _told(path):
                stream = self._fs.create(self._at(draft), True)
                try:
                    stream.write(bytearray(data))
                    stream.hsync()
                finally:
                    stream.close()
            self.move(draft, path)
        except ArchiveError:
            with suppress(ArchiveError):
                self.delete(draft)
            raise

    def move(self, source: str, target: str) -> None:
        """Rename a file, and make the directory that it goes to.

        Of several who move to one target at once one succeeds: HDFS refuses to rename
        to a name that is taken, and on a local disk a link is made first, which fails
        then. Elsewhere, and on disks without links, that is not certain.

        Raises:
            ArchiveError: The target exists, or the file system refused.
        """
        with _told(target):
            start, place = self._at(source), self._at(target)
            self._fs.mkdirs(place.getParent())
            if self._link(start, place):
                self._fs.delete(start, True)
                return
            is_taken = self._fs.exists(place)
            if not is_taken and self._fs.rename(start, place):
                return
            if is_taken or self._fs.exists(place):
                raise ArchiveError(
                    f"{self.root}: {target} exists: another job writes this archive"
                )
            raise ArchiveError(f"{self.root}: cannot rename {source} to {target}")

    def _link(self, source: Any, target: Any) -> bool:
        """Give a file of a local disk a second name, unless that one is taken.

        Hadoop's own rename would replace a file of that name.

        Returns:
            False: it is taken, or there are no links there. Any other error is raised:
            a rename would replace a file put there meanwhile.
        """
        file_of = self._jvm.java.io.File
        there = self._fs.resolvePath(source).toUri()
        if there.getScheme() != LOCAL:
            return False
        directory = self._fs.resolvePath(target.getParent()).toUri()
        old = file_of(there.getPath())
        new = file_of(directory.getPath(), target.getName())
        try:
            self._jvm.java.nio.file.Files.createLink(new.toPath(), old.toPath())
        except SPARK_ERRORS as error:
            if any(name in str(error) for name in NO_LINK):
                return False
            raise
        # Hadoop keeps checksums beside the file, and reads one that has none.
        sums = [
            file_of(file.getParent(), f".{file.getName()}.crc") for file in (old, new)
        ]
        if not sums[0].renameTo(sums[1]):
            sums[1].delete()
        return True

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it; or nothing."""
        with _told(path):
            self._fs.delete(self._at(path), True)

    def url_of(self, path: str) -> str:
        """Return the URL of a path."""
        url: str = self._at(path).toString()
        return url

    def path_of(self, uri: str) -> str:
        """Return the path of a file that Spark names in a column: an encoded URI."""
        decoded = self._jvm.java.net.URI(uri)
        path = self._jvm.org.apache.hadoop.fs.Path(decoded)
        return self._below(self._fs.makeQualified(path).toString())

    def _at(self, path: str) -> Any:
        if not path:
            return self._root
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.root}/{path}")

    def _below(self, url: str) -> str:
        assert url.startswith(self.root), f"{url} is not below {self.root}"
        return url[len(self.root) :].lstrip("/")


@contextmanager
def _told(subject: object) -> Iterator[None]:
    """Turn an error of the JVM into one sentence."""
    try:
        yield
    except SPARK_ERRORS as error:
        raise ArchiveError(f"{subject}: {sentence_of(error)}") from error
