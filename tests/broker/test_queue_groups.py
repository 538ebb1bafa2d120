"""A queue group on its broker."""

from unittest.mock import Mock

from metaq.broker.queue_groups import QueueGroup
from metaq.zk.group_definitions import QueueGroupDefinition


def test_a_group_that_waits_no_more_is_not_woken() -> None:
    """The wait of one partition ends; the others go on."""
    group = QueueGroup("g", QueueGroupDefinition(topic="t"))
    first, second = Mock(), Mock()
    group.waits = {0: first, 1: second}
    group.stop_waiting(0)
    group.stop_waiting(0)
    first.cancel.assert_called_once_with()
    second.cancel.assert_not_called()
    assert group.waits == {1: second}
