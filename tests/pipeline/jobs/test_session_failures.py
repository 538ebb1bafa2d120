"""Failures of Spark as one sentence."""

import os

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from metaq.pipeline.errors import JobError
from metaq.pipeline.jobs.session import job_errors

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_worker_that_dies_is_one_sentence(spark: SparkSession) -> None:
    """The kernel ends one that needs too much memory; Spark gives that no type."""
    with pytest.raises(JobError) as failed, job_errors("verify"):
        spark.sparkContext.parallelize([3], 1).foreach(os._exit)
    said = str(failed.value)
    assert said.startswith("verify: org.apache.spark.SparkException: Job aborted")
    assert "Python worker exited unexpectedly (crashed)" in said
    assert "\n" not in said


def test_a_driver_that_is_gone_is_told_as_that() -> None:
    """Its own error says only that a connection was refused."""
    with pytest.raises(JobError) as failed, job_errors("audit"):
        raise ConnectionRefusedError(111, "Connection refused")
    assert str(failed.value) == "audit: Spark's driver has gone: Connection refused"
    text = "<_MultiThreadedRendezvous of RPC:\n\tstatus = StatusCode.UNAVAILABLE\n>"
    with pytest.raises(JobError) as failed, job_errors("pipeline p"):
        raise PySparkException(text)  # as a client of Spark Connect has it
    assert str(failed.value) == "pipeline p: Spark's driver has gone"
