"""The only door to the disk: open, write, sync, rename, truncate, remove and lock.

Theory of operation. Everything above this module promises durability with three
facts, and this module is where they are made true:

* A byte is on disk when a call of `AppendFile.sync` has returned that began after the
  byte was written. A write alone promises nothing, not even an order among writes.
* A name is in its directory when the *directory* has been synced. Every function here
  that creates, renames or removes a name syncs the directory before it returns, so no
  caller has to remember it. Names are also removed in the order of the calls: a crash
  between two removals leaves no gap in a list of segments.
* A failed sync is final. Linux marks the pages clean although they never reached the
  disk, so the next sync would report success for bytes that are lost. A file whose sync
  failed refuses every later write and sync; only recovery, which reads the disk again,
  may trust the directory.

`OSError` does not leave this package: `calls.py` translates it. Callers see neither
EINTR nor short writes.

The seam for tests is one step below: `SystemCalls`. The order of syncs, the loops over
short writes and the translation of errors are the same lines of code on the real disk
and on the faulty one in memory, so a power cut in a test exercises the real code.

Files are not mapped into memory: a read error under a mapping, or a file that gets
shorter, kills the whole process with SIGBUS instead of failing one read. Scans of large
files reuse one buffer through `ReadFile.read_into`.

All calls block and may take seconds on a bad disk; they belong on a storage thread. A
sync can also run in the background (`AppendFile.begin_sync`).
Objects are not thread-safe, except `FileSystem`, and `ReadFile` until it is closed.
"""

from metaq.fs.calls import Buffer
from metaq.fs.file_system import DIRECTORY_MODE, LOCK_FILE, FileSystem, SystemFileSystem
from metaq.fs.files import AppendFile, DirLock, ReadFile, UpdateFile

__all__ = [
    "DIRECTORY_MODE",
    "LOCK_FILE",
    "AppendFile",
    "Buffer",
    "DirLock",
    "FileSystem",
    "ReadFile",
    "SystemFileSystem",
    "UpdateFile",
]
