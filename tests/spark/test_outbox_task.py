"""Under which name a task writes."""

from metaq.spark.sink.outbox import WriteName, write_name


def test_no_two_runs_have_the_same_name_to_fall_back_on() -> None:
    """Spark numbers the runs of each driver from 0; names are remembered for longer."""
    one, two = write_name("w"), write_name("w")
    assert one.producer == two.producer
    assert one.attempt != two.attempt


def test_names_are_as_they_were() -> None:
    """Brokers know a batch by them that another version of this package has sent."""
    name = WriteName("0f8fad5b-d9cb-469f-a165-70867728950e", 7, 3, 11)
    assert name.producer == "w-4b3704d08fa8f0ae2fd3ef05-7-3"
