"""Errors of pipeline jobs, beyond those of `metaq.spark`."""

from metaq.spark.errors import SparkError


class JobError(SparkError):
    """A pipeline job failed; the message is that of its cause, with its partition."""


class ArchiveError(JobError):
    """An archive contradicts its table, or has another writer."""


class CommitRaceError(ArchiveError):
    """Another job has committed to the table in the same moment."""
