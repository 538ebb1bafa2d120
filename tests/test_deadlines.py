"""Deadlines of many keys: a dictionary's answers, and a heap that does not grow."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.deadlines import SPARE_MAX, Deadlines

KEYS = st.sampled_from("abcd")
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("clear"), KEYS),
    st.tuples(st.just("take"), st.integers(0, 9)),
)


@given(steps=st.lists(STEPS, max_size=60))
def test_each_key_is_due_once_at_its_last_deadline(steps: list[tuple]) -> None:
    """Deadlines set again or cleared are not due; equal ones come as they were set."""
    deadlines = Deadlines[str]()
    model: dict[str, int] = {}
    for step in steps:
        if step[0] == "set":
            deadlines.set(step[1], step[2])
            model.pop(step[1], None)
            model[step[1]] = step[2]
        elif step[0] == "clear":
            deadlines.clear(step[1])
            model.pop(step[1], None)
        else:
            due = [key for key, due_s in model.items() if due_s <= step[1]]
            due.sort(key=model.__getitem__)
            assert deadlines.take_due(step[1]) == due
            for key in due:
                del model[key]
        assert len(deadlines) == len(model)
        assert {key: deadlines.get(key) for key in "abcd"} == {
            key: model.get(key) for key in "abcd"
        }


def test_what_is_cleared_is_not_kept_for_ever() -> None:
    """A far deadline that is cleared leaves the heap before its time."""

    class Key:
        count = 0

        def __init__(self) -> None:
            Key.count += 1

        def __del__(self) -> None:
            Key.count -= 1

    deadlines = Deadlines[Key]()
    for _ in range(5 * SPARE_MAX):
        key = Key()
        deadlines.set(key, 1e9)
        deadlines.clear(key)
    assert len(deadlines) == 0
    assert Key.count <= SPARE_MAX + 2
