"""A cache of ids keeps the most recently used ones, and counts."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import LruDuplicateIds
from metaq.client.duplicate_ids import CAPACITY, LruStatistics, key_of
from metaq.errors import ConfigError
from metaq.model import MessageId

KEYS = st.lists(st.sampled_from("abcdefgh"), max_size=8)


def test_the_key_is_that_of_metaq() -> None:
    """The group and the decimal id, with nothing between them."""
    assert key_of("group-1", MessageId(1234567890123)) == "group-11234567890123"
    assert key_of("g", MessageId(-5)) == "g-5"
    assert CAPACITY == 4096


def test_what_was_used_last_stays() -> None:
    """Asking for a key uses it; the one that was not used for longest goes."""
    ids = LruDuplicateIds(2)
    ids.add(["a", "b"])
    assert ids.seen(["a"]) == ["a"]
    ids.add(["c"])
    assert ids.seen(["a", "b", "c"]) == ["a", "c"]
    assert ids.statistics() == LruStatistics(
        hit_count=3, miss_count=1, evicted_count=1, key_count=2
    )


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity: expected 1 or more, got 0"):
        LruDuplicateIds(0)


@given(
    capacity=st.integers(1, 6),
    calls=st.lists(st.tuples(st.booleans(), KEYS), max_size=30),
)
def test_it_does_what_a_list_would_do(
    capacity: int, calls: list[tuple[bool, list[str]]]
) -> None:
    """The model: a list in the order of use, cut at its old end."""
    ids = LruDuplicateIds(capacity)
    model: list[str] = []
    hits = misses = evicted = 0
    for is_add, keys in calls:
        if is_add:
            ids.add(keys)
            used = keys
        else:
            used = [key for key in keys if key in model]
            assert ids.seen(keys) == used
            hits += len(used)
            misses += len(keys) - len(used)
        for key in used:
            model = [one for one in model if one != key] + [key]
        evicted += max(0, len(model) - capacity)
        model = model[-capacity:]
        assert ids.statistics() == LruStatistics(hits, misses, evicted, len(model))


def test_threads_share_a_cache() -> None:
    """No call of many threads is lost, and the bound holds."""
    ids = LruDuplicateIds(50)

    def work(name: int) -> None:
        for number in range(200):
            ids.add([f"{name}-{number}"])
            ids.seen([f"{name}-{number}"])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ids.statistics()
    assert found.hit_count + found.miss_count == 800
    assert found.key_count == 50
    assert found.evicted_count == 750
