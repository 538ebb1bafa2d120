"""Values of settings: defaults of topics, and the text of a policy."""

import dataclasses

import pytest

from metaq.config.settings import (
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    BrokerConfig,
    DeleteKind,
    DeletePolicy,
    LimitsConfig,
    SystemConfig,
    TopicConfig,
    default_data_path,
    default_topic,
)


@pytest.mark.parametrize(
    ("age_ms", "text"),
    [
        (0, "0h"),
        (168 * HOUR_MS, "168h"),
        (90 * MINUTE_MS, "90m"),
        (61 * SECOND_MS, "61s"),
    ],
)
def test_an_age_is_in_the_coarsest_unit_that_is_exact(age_ms: int, text: str) -> None:
    """So that it reads back as the same age."""
    assert str(DeletePolicy(DeleteKind.DELETE, age_ms)) == f"delete,{text}"


def test_only_a_compressed_policy_has_a_third_part() -> None:
    """As MetaQ writes it."""
    policy = DeletePolicy(DeleteKind.ARCHIVE, HOUR_MS, is_compressed=True)
    assert str(policy) == "archive,1h,true"
    assert str(dataclasses.replace(policy, is_compressed=False)) == "archive,1h"


def test_the_journal_is_in_the_data_directory_unless_it_has_its_own() -> None:
    """One setting moves both."""
    assert SystemConfig().data_log_path == default_data_path()
    assert SystemConfig(data_path="/d").data_log_path == "/d"
    assert SystemConfig(data_path="/d", data_log_path="/j").data_log_path == "/j"


def test_data_is_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """MetaQ's place, where no setting names one."""
    monkeypatch.setenv("HOME", "/elsewhere")
    assert SystemConfig().data_path == "/elsewhere/meta"


def test_a_topic_without_a_section_has_every_value_of_system() -> None:
    """A field of both with one name is taken over; none is forgotten."""
    system = SystemConfig(
        partition_count=7,
        stat=True,
        delete_policy=DeletePolicy(DeleteKind.ARCHIVE, 5 * HOUR_MS),
        delete_when="0 0 1 * * ?",
        data_path="/data",
        unflush_interval_ms=11,
        unflush_threshold=12,
        accept_publish=False,
        accept_subscribe=False,
    )
    topic = default_topic("t", system)
    shared = {f.name for f in dataclasses.fields(TopicConfig)} & {
        f.name for f in dataclasses.fields(SystemConfig)
    }
    assert {name: getattr(topic, name) for name in shared} == {
        name: getattr(system, name) for name in shared
    }
    assert all(
        getattr(topic, name) != getattr(TopicConfig(name="t"), name) for name in shared
    )


def test_a_section_wins_over_a_definition_and_both_over_defaults() -> None:
    """Every topic has settings, known or not; names come once, sections first."""
    section, defined = (TopicConfig(name="a", partition_count=n) for n in (2, 3))
    config = BrokerConfig(
        topics={"b": TopicConfig(name="b"), "a": section},
        defined={"c": defined, "a": defined},
        system=SystemConfig(partition_count=9),
    )
    assert config.topic("a") is section
    assert config.topic("c") is defined
    assert config.topic("other") == TopicConfig(name="other", partition_count=9)
    assert config.topic_names == ("b", "a", "c")


def test_the_bound_of_a_log_is_of_no_log_of_the_broker_itself() -> None:
    """Else records that a queue at rest needs were gone, or every settle refused."""
    config = BrokerConfig(limits=LimitsConfig(log_bytes_max=2000))
    assert config.log_bytes_max_of("a") == 2000
    assert config.log_bytes_max_of("__queues") == 0


@pytest.mark.parametrize(
    ("interval_ms", "interval_s"), [(1_500, 1.5), (0, 0.0), (-1, 0.0)]
)
def test_the_age_of_unsynced_records_is_never_negative(
    interval_ms: int, interval_s: float
) -> None:
    """Without a timer it is 0."""
    topic = TopicConfig(name="t", unflush_interval_ms=interval_ms)
    assert topic.unflush_interval_s == interval_s
