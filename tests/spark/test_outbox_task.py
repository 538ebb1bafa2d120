"""Under which name a task writes."""

from metaq.spark.sink.outbox import write_name


def test_no_two_runs_have_the_same_name_to_fall_back_on() -> None:
    """Spark numbers the runs of each driver from 0; names are remembered for longer."""
    one, two = write_name("w"), write_name("w")
    assert one.producer == two.producer
    assert one.attempt != two.attempt
