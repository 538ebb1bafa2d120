"""Options of a queue group."""

import pytest

from metaq.queues.rules import QueueRules


@pytest.mark.parametrize(
    ("delays", "found"),
    [((), [0, 0, 0, 0]), ((5,), [5, 5, 5, 5]), ((1, 2, 3), [1, 2, 3, 3])],
)
def test_the_delay_goes_by_the_number_of_deliveries(
    delays: tuple[int, ...], found: list[int]
) -> None:
    """The last one repeats; without any a message is ready at once."""
    rules = QueueRules(retry_delays_ms=delays)
    assert [rules.retry_delay_ms(number) for number in (1, 2, 3, 4)] == found
