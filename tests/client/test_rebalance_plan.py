"""Assignments and plans: tables, and properties of all of them."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.assignment import RebalancePlan, Strategy, assignment_of, plan_rebalance
from metaq.client.names import name_some
from metaq.model import BrokerId, TopicPartition

numbers = st.sets(st.integers(0, 8))


def parts(numbers: set[int], topic: str = "t") -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(topic, BrokerId(0), n) for n in numbers)


def test_what_is_lost_goes_and_what_is_new_comes() -> None:
    """A kept partition is in neither set."""
    plan = plan_rebalance(
        owned=parts({0, 1}), active=parts({0, 1}), assignment=parts({1, 2})
    )
    assert plan == RebalancePlan(revoke=parts({0}), claim=parts({2}))


def test_what_is_owned_and_not_read_is_taken_again() -> None:
    """Its active could not begin; or, if it is another's by now, it is released."""
    plan = plan_rebalance(
        owned=parts({0, 1}), active=parts(set()), assignment=parts({1})
    )
    assert plan == RebalancePlan(revoke=parts({0}), claim=parts({1}))


@given(owned=numbers, active=numbers, assignment=numbers)
def test_a_plan_leads_to_the_assignment(
    owned: set[int], active: set[int], assignment: set[int]
) -> None:
    """After it exactly the assignment is read, and nothing else owned."""
    plan = plan_rebalance(
        owned=parts(owned), active=parts(active), assignment=parts(assignment)
    )
    assert (parts(active) - plan.revoke) | plan.claim == parts(assignment)
    assert parts(owned) - plan.revoke <= parts(assignment)
    assert plan.revoke.isdisjoint(plan.claim)
    assert plan.claim.isdisjoint(parts(active))


@given(
    strategy=st.sampled_from(Strategy),
    members=st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.lists(st.sampled_from(["t", "u"])).map(tuple),
        max_size=5,
    ),
    counts=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_assignments_divide_what_is_subscribed_to(
    strategy: Strategy, members: dict[str, tuple[str, ...]], counts: tuple[int, int]
) -> None:
    """Each partition has one reader, of those who want its topic, if there is one."""
    topics = {
        topic: parts(set(range(count)), topic)
        for topic, count in zip(("t", "u"), counts, strict=True)
    }
    found = [
        assignment_of(
            member,
            strategy=strategy,
            members=members,
            partitions={topic: topics[topic] for topic in subscribed},
        )
        for member, subscribed in members.items()
    ]
    wanted = {topic for subscribed in members.values() for topic in subscribed}
    expected = frozenset().union(*(topics[topic] for topic in wanted))
    assert sum(map(len, found)) == len(expected)
    assert frozenset().union(*found) == expected


def test_names_are_ordered_as_metaq_orders_them() -> None:
    """`0-10` comes before `0-2`: the vector of MetaQ's tests."""
    found = [
        assignment_of(
            member,
            strategy=Strategy.DEFAULT,
            members=dict.fromkeys(("g_c3", "g_c1", "g_c2"), ("t",)),
            partitions={"t": parts(set(range(11)))},
        )
        for member in ("g_c1", "g_c2", "g_c3")
    ]
    assert found == [parts({0, 1, 10, 2}), parts({3, 4, 5, 6}), parts({7, 8, 9})]


def test_a_line_names_five_partitions_and_counts_the_rest() -> None:
    """In their order, for any order of the set."""
    assert name_some(parts({1, 0})) == "t/0-0, t/0-1"
    assert name_some(parts(set(range(5)))).count(",") == 4
    assert name_some(parts(set(range(7)))).endswith("t/0-4 and 2 more")
