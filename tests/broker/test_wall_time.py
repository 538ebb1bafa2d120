"""The wall clock, but for jumps."""

import pytest

from metaq.broker.wall_time import STEADY_MS, WallTime


def test_a_clock_that_is_set_right_is_followed() -> None:
    """A second at once, or a thousandth of the time that passed."""
    wall = WallTime(10_000, 0)
    assert wall.look(11_900, 1_000) == 11_900
    assert wall.look(100_000 + 11_900 + 1_100, 101_000) == 113_000
    assert wall.lead_ms == 0


@pytest.mark.parametrize("jump_ms", [-(10**9), -1_500, 1_500, 10**9])
def test_a_clock_that_jumped_is_believed_when_it_runs_evenly(jump_ms: int) -> None:
    """For a minute; a second jump begins another one."""
    wall = WallTime(10**12, 0)
    assert wall.look(10**12 + 1_000 + jump_ms, 1_000) == 10**12 + 1_000
    assert wall.lead_ms == jump_ms
    assert wall.look(10**12 + 31_000 + jump_ms, 31_000) == 10**12 + 31_000
    assert wall.look(10**12 + 40_000 + 3 * jump_ms, 40_000) == 10**12 + 40_000
    late = 40_000 + STEADY_MS - 1
    assert wall.look(10**12 + late + 3 * jump_ms, late) == 10**12 + late
    end = 10**12 + late + 1 + 3 * jump_ms
    assert wall.look(end, late + 1) == end
    assert wall.lead_ms == 0


def test_a_jump_that_is_taken_back_was_none() -> None:
    """The wall clock is where it would be."""
    wall = WallTime(10**12, 0)
    assert wall.look(10**12 + 10**7, 100) == 10**12 + 100
    assert wall.look(10**12 + 200, 200) == 10**12 + 200
    assert wall.lead_ms == 0
