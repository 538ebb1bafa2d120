"""Metrics are what the snapshot says, in Prometheus' text format."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metaq.broker.context import CommandStatistics
from metaq.broker.health import Alarm
from metaq.broker.http import METRICS, render_metrics
from metaq.broker.mailboxes import MailboxStatistics
from metaq.broker.status import (
    GROUP_SERIES_MAX,
    LOG_SERIES_MAX,
    BrokerStatus,
    JobStatus,
    RetentionStatus,
)
from metaq.lifecycle import State
from metaq.replication.facts import FollowerLag, ReplicaStatus
from metaq.storage.log_state import LogState
from metaq.zk.registry import RegistrationState
from metaq.zk.session import SessionState
from tests.broker.figures import (
    DELAYS,
    DIRECTORY,
    HEALTHY,
    QUEUE_GROUP,
    SCRUB,
    TRANSACTIONS,
    log,
    registration,
    status,
)
from tests.exposition import changed

FULL = status(
    replica=ReplicaStatus(
        replica=2,
        epoch=36,
        in_sync_count=37,
        leaderless_s=1.75,
        damaged=41,
        mended=42,
        mended_bytes=43,
        followers=(
            FollowerLag(3, "in sync", is_connected=True, lag_bytes=38, lag_s=2.25),
        ),
    ),
    commands=CommandStatistics(
        cmd_put=10,
        put_failed=11,
        cmd_get=12,
        get_miss=13,
        get_failed=14,
        cmd_offset=15,
        batch_repeated=32,
        wait_count=16,
        filtered=47,
        filter_plain=48,
        filter_scanned_bytes=49,
        malformed_count=18,
        error_count=19,
        rejections=Counter(no_space=21, closed=22),
        routed=Counter(routed=66, alternate=67, dropped=68, unroutable=69),
    ),
    waiting_count=17,
    in_flight_bytes=20,
    partial_bytes=33,
    reply_bytes=34,
    dropped_count=35,
    transactions=replace(
        TRANSACTIONS,
        in_doubt_count=2,
        oldest_in_doubt_ms=1500,
        untimed_count=70,
        oldest_untimed_ms=71_500,
        stuck_count=7,
        outcome_count=32,
        journal_sync_count=33,
    ),
    reload_count=23,
    queue_groups=(QUEUE_GROUP,),
    delays=DELAYS,
    mailboxes=MailboxStatistics(60, 61, 62, 63, 64),
    scrub=SCRUB,
    retention=RetentionStatus(segment_count=27, removed_bytes=28, failure_count=29),
    jobs=(JobStatus(name="sync", run_count=30, failure_count=31, last_error=""),),
)


def samples(broker: BrokerStatus) -> dict[str, float]:
    """Return every sample by its name and labels, as they are written."""
    text = render_metrics(broker).decode()
    return {
        f"{sample.name}{{{_labels(sample.labels)}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


EXPECTED = {
    "metaq_build_info{broker_id=3,version=1.0}": 1,
    "metaq_uptime_seconds{}": 12.5,
    "metaq_reloads_total{}": 23,
    "metaq_connections{}": 7,
    "metaq_connections_max{}": 100,
    "metaq_connections_accepted_total{}": 70,
    "metaq_connections_refused_total{}": 5,
    "metaq_accept_pauses_total{}": 1,
    "metaq_commands_total{command=put}": 10,
    "metaq_commands_total{command=get}": 12,
    "metaq_commands_total{command=offset}": 15,
    "metaq_rejections_total{cause=no_space}": 21,
    "metaq_rejections_total{cause=closed}": 22,
    "metaq_put_failures_total{}": 11,
    "metaq_get_failures_total{}": 14,
    "metaq_get_misses_total{}": 13,
    "metaq_repeated_batches_total{}": 32,
    "metaq_routed_messages_total{outcome=routed}": 66,
    "metaq_routed_messages_total{outcome=alternate}": 67,
    "metaq_routed_messages_total{outcome=dropped}": 68,
    "metaq_routed_messages_total{outcome=unroutable}": 69,
    "metaq_waits_total{}": 16,
    "metaq_filtered_gets_total{}": 47,
    "metaq_filter_plain_gets_total{}": 48,
    "metaq_filter_scanned_bytes_total{}": 49,
    "metaq_waiting_gets{}": 17,
    "metaq_malformed_commands_total{}": 18,
    "metaq_command_errors_total{}": 19,
    "metaq_in_flight_bytes{}": 20,
    "metaq_partial_bytes{}": 33,
    "metaq_reply_bytes{}": 34,
    "metaq_connections_dropped_total{}": 35,
    "metaq_put_latency_seconds_bucket{le=0.001}": 3,
    "metaq_put_latency_seconds_bucket{le=0.01}": 5,
    "metaq_put_latency_seconds_bucket{le=+Inf}": 6,
    "metaq_put_latency_seconds_count{}": 6,
    "metaq_put_latency_seconds_sum{}": 0.25,
    "metaq_sync_latency_seconds_count{}": 6,
    "metaq_logs{}": 2,
    "metaq_log_size_bytes{partition=1,topic=test}": 4100,
    "metaq_log_held_bytes{partition=1,topic=test}": 0,
    "metaq_log_segments{partition=1,topic=test}": 2,
    "metaq_log_records{partition=1,topic=test}": 40,
    "metaq_log_start_bytes{partition=1,topic=test}": 1000,
    "metaq_log_high_watermark_bytes{partition=1,topic=test}": 5000,
    "metaq_log_end_bytes{partition=1,topic=test}": 5100,
    "metaq_log_appends_total{partition=1,topic=test}": 30,
    "metaq_log_refused_appends_total{partition=1,topic=test}": 3,
    "metaq_log_producers{partition=1,topic=test}": 9,
    "metaq_log_forgotten_producers_total{partition=1,topic=test}": 11,
    "metaq_log_syncs_total{partition=1,topic=test}": 20,
    "metaq_log_sync_seconds_total{partition=1,topic=test}": 0.5,
    "metaq_log_damaged_ranges{partition=1,topic=test}": 0,
    "metaq_log_lost_ranges{partition=1,topic=test}": 0,
    "metaq_log_group_commit{partition=1,topic=test}": 1,
    "metaq_directory_online{directory=data}": 1,
    "metaq_directory_size_bytes{directory=data}": 8200,
    "metaq_directory_free_bytes{directory=data}": 1e9,
    "metaq_registered{}": 1,
    "metaq_zookeeper_connected{}": 1,
    "metaq_zookeeper_sessions_total{}": 2,
    "metaq_registered_topics{}": 4,
    "metaq_registration_failures_total{}": 6,
    "metaq_registration_repairs_total{}": 8,
    "metaq_replica_epoch{}": 36,
    "metaq_replica_in_sync{}": 37,
    "metaq_replica_damaged_ranges{}": 41,
    "metaq_replica_mended_ranges_total{}": 42,
    "metaq_replica_mended_bytes_total{}": 43,
    "metaq_replica_leaderless_seconds{}": 1.75,
    "metaq_follower_lag_bytes{replica=3}": 38,
    "metaq_follower_lag_seconds{replica=3}": 2.25,
    "metaq_scrub_passes_total{}": 25,
    "metaq_scrub_checked_bytes{}": 24,
    "metaq_scrub_pass_bytes{}": 26,
    "metaq_scrub_damaged_ranges{}": 9,
    "metaq_queue_open_messages{group=workers,topic=test}": 44,
    "metaq_queue_ready_messages{group=workers,topic=test}": 45,
    "metaq_queue_delayed_messages{group=workers,topic=test}": 46,
    "metaq_queue_unread_bytes{group=workers,topic=test}": 47,
    "metaq_queue_done_messages_total{group=workers,topic=test}": 48,
    "metaq_queue_passed_messages_total{group=workers,topic=test}": 60,
    "metaq_queue_expired_leases_total{group=workers,topic=test}": 49,
    "metaq_queue_skipped_bytes_total{group=workers,topic=test}": 61,
    "metaq_queue_dead_letters_total{group=workers,topic=test}": 50,
    "metaq_delayed_messages{}": 55,
    "metaq_delayed_bytes{}": 56,
    "metaq_delayed_delivered_messages_total{}": 57,
    "metaq_delayed_cancelled_messages_total{}": 58,
    "metaq_delayed_late_seconds{}": 0.059,
    "metaq_mailboxes{}": 60,
    "metaq_mailbox_replies_total{}": 61,
    "metaq_mailbox_gone_total{}": 62,
    "metaq_mailbox_dropped_total{}": 63,
    "metaq_mailbox_refused_total{}": 64,
    "metaq_retention_segments_total{}": 27,
    "metaq_retention_removed_bytes_total{}": 28,
    "metaq_retention_failures_total{}": 29,
    "metaq_transaction_events_total{event=committed}": 4,
    "metaq_transactions_open{}": 3,
    "metaq_transactions_in_doubt{}": 2,
    "metaq_transactions_oldest_in_doubt_seconds{}": 1.5,
    "metaq_transactions_untimed{}": 70,
    "metaq_transactions_oldest_untimed_seconds{}": 71.5,
    "metaq_transactions_stuck{}": 7,
    "metaq_transactions_heuristic_outcomes{}": 32,
    "metaq_transactions_held_bytes{}": 700,
    "metaq_transaction_journal_bytes{}": 900,
    "metaq_transaction_journal_syncs_total{}": 33,
    "metaq_transaction_journal_sync_latency_seconds_count{}": 6,
    "metaq_transaction_journal_online{}": 1,
    "metaq_job_runs_total{job=sync}": 30,
    "metaq_job_failures_total{job=sync}": 31,
}


def test_each_metric_shows_its_figure() -> None:
    """Every figure of the snapshot differs, so none can stand in for another."""
    found = samples(FULL)
    assert {key: found.get(key) for key in EXPECTED} == EXPECTED


def test_dashboards_find_what_they_found() -> None:
    """Names, labels, sentences and numbers are those of the golden page."""
    assert changed(render_metrics(FULL).decode(), "broker.txt") == {}


def test_every_metric_is_tried() -> None:
    """A new metric needs a line above; alarms have a test of their own."""
    tried = {
        re.sub(r"(_bucket|_count|_sum)?\{.*", "", key)
        if "latency" in key
        else key.partition("{")[0]
        for key in EXPECTED
    }
    assert tried | {"metaq_alarm"} == {metric.spec.name for metric in METRICS}


def test_names_are_those_of_good_manners() -> None:
    """One prefix, base units, counters end in _total; nothing is named twice."""
    names = [metric.spec.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"metaq_[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|millis|kib|mib|percent)(_|$)", name)


def test_alarms_are_all_there_and_those_that_ring_are_one() -> None:
    """A rule can be written before anything ever goes wrong."""
    found = samples(status(state=State.STOPPING))
    alarms = {
        key.partition("alarm=")[2].partition(",")[0]: value
        for key, value in found.items()
        if key.startswith("metaq_alarm{")
    }
    assert alarms.keys() == {alarm.value for alarm in Alarm}
    assert [name for name, value in alarms.items() if value] == ["not_running"]


def test_parts_that_are_not_there_have_no_series() -> None:
    """A zero would say that they are there and idle."""
    found = samples(status(registration=None, scrub=None))
    for prefix in ("metaq_regist", "metaq_zoo", "metaq_scrub"):
        assert not [key for key in found if key.startswith(prefix)]


def test_trouble_is_visible() -> None:
    """Offline, damaged, weaker than synced, not registered: each has its number."""
    found = samples(
        status(
            directories=(replace(DIRECTORY, offline_cause="EIO"),),
            logs=(log("t", 0, damage=("x", "y"), is_group_commit=False),),
            registration=registration(
                RegistrationState.PENDING, SessionState.SUSPENDED
            ),
        )
    )
    assert found["metaq_directory_online{directory=data}"] == 0
    assert found["metaq_log_damaged_ranges{partition=0,topic=t}"] == 2
    assert found["metaq_log_group_commit{partition=0,topic=t}"] == 0
    assert found["metaq_registered{}"] == 0
    assert found["metaq_zookeeper_connected{}"] == 0


@pytest.mark.parametrize("topic", ['a"b', "a\\b", "a\nb", "主题", "a{b}", "\udcff"])
def test_topics_of_any_name_can_be_read_back(topic: str) -> None:
    """Labels are escaped; what UTF-8 cannot hold does not break the page."""
    text = render_metrics(status(logs=(log(topic, 0),))).decode()
    topics = {
        sample.labels["topic"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "metaq_log_size_bytes"
    }
    assert topics == {topic.replace("\udcff", "\\udcff")}


@pytest.mark.slow
def test_the_page_does_not_grow_without_bound() -> None:
    """Logs beyond the cap are counted, and their damage still rings."""
    logs = [log("t", n) for n in range(LOG_SERIES_MAX + 1)]
    logs[-1] = replace(logs[-1], state=LogState.STOPPED, damage=("x",))
    found = samples(status(logs=tuple(logs)))
    series = [key for key in found if key.startswith("metaq_log_size_bytes{")]
    assert len(series) == LOG_SERIES_MAX
    assert found["metaq_logs{}"] == LOG_SERIES_MAX + 1
    assert found["metaq_alarm{alarm=log_stopped,severity=failing}"] == 1


def test_queue_groups_beyond_the_cap_have_no_series() -> None:
    """Those that have are the first ones by name."""
    groups = [replace(QUEUE_GROUP, group=f"g{n}") for n in range(GROUP_SERIES_MAX + 1)]
    found = samples(status(queue_groups=tuple(groups)))
    series = [key for key in found if key.startswith("metaq_queue_open_messages{")]
    assert len(series) == GROUP_SERIES_MAX


def test_the_process_is_shown_too() -> None:
    """Memory and descriptors come from the library."""
    found = samples(HEALTHY)
    assert found["process_resident_memory_bytes{}"] > 0
    assert found["process_open_fds{}"] > 0


def test_two_pages_do_not_share_anything() -> None:
    """No registry keeps what an earlier page said."""
    assert samples(FULL)["metaq_scrub_passes_total{}"] == 25
    assert "metaq_scrub_passes_total{}" not in samples(HEALTHY)
