"""Errors of pipeline jobs, beyond those of `metaq.spark`."""

from metaq.spark.errors import SparkError


class JobError(SparkError):
    """A pipeline job failed; the message has the cause, with the partition if known."""


class ArchiveError(JobError):
    """An archive cannot be used, contradicts its table, or has two writers."""


class CommitRaceError(ArchiveError):
    """Another job has committed to the table at the same time."""
