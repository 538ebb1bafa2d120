"""A real broker, killed under load, again and again, on the same directory."""

import os
from pathlib import Path
from random import Random

import pytest

from tests.crash.accounts import Putter, kill_under, read_log, seed_from_environment
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until
from tests.sampling import IS_WHOLE

ROUNDS = int(os.environ.get("METAQ_CRASH_ROUNDS") or (8 if IS_WHOLE else 3))

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]


def make_broker(directory: Path) -> BrokerProcess:
    """Return a broker that rolls while it is under load."""
    return BrokerProcess(
        directory / "data", topic="crash", partition_count=2, segment_bytes=3_000_000
    )


def check(
    port: int, acked: dict[tuple[int, int], bytes], tried: set[bytes]
) -> dict[tuple[int, int], bytes]:
    """Compare what is readable with what was promised; return what is readable."""
    found = {
        (partition, offset): payload
        for partition in range(2)
        for offset, payload in read_log(port, partition).items()
    }
    lost = {key: p for key, p in acked.items() if found.get(key) != p}
    assert not lost, f"{len(lost)} acknowledged records lost, first {min(lost)}"
    phantoms = [key for key, payload in found.items() if payload not in tried]
    assert not phantoms, f"records that were never put: {phantoms[:3]}"
    assert len(set(found.values())) == len(found), "a put was stored twice"
    return found


def test_nothing_acknowledged_is_lost_when_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    """After kill -9 at random moments every 200 is readable where it said."""
    seed = seed_from_environment()
    print(f"METAQ_SEED={seed}")
    random = Random(seed)
    acked: dict[tuple[int, int], bytes] = {}
    tried: set[bytes] = set()
    last_id = 0
    with make_broker(tmp_path) as broker:
        for round_number in range(ROUNDS):
            putters = [
                Putter(broker.port, f"r{round_number}p{n}", Random(random.random()))
                for n in range(3)
            ]

            def is_enough(number: int = round_number) -> bool:
                # The others may be killed before anything is acknowledged.
                return number < ROUNDS - 1 or any(p.accounts.acked for p in putters)  # noqa: B023

            kill_under(broker, putters, random.uniform(0.05, 0.8), is_enough)
            for putter in putters:
                assert not putter.accounts.refused
                acked.update(putter.accounts.acked)
                tried |= putter.accounts.tried
            ids = sorted(i for putter in putters for i in putter.accounts.ids)
            if ids:
                assert ids[0] > last_id, "an id of before the restart came again"
                assert len(set(ids)) == len(ids)
                last_id = ids[-1]
            broker.start()
            found = check(broker.port, acked, tried)
            acked = found  # what a consumer has read may never go away either
        assert broker.stop() == 0
    assert acked


def test_sigterm_under_load_loses_nothing_and_exits_with_0(tmp_path: Path) -> None:
    """Every put gets a reply or a closed connection; what was acknowledged stays."""
    seed = seed_from_environment()
    print(f"METAQ_SEED={seed}")
    with make_broker(tmp_path) as broker:
        putters = [Putter(broker.port, f"p{n}", Random(seed + n)) for n in range(3)]
        for putter in putters:
            putter.start()
        wait_until(lambda: all(len(putter.accounts.acked) > 300 for putter in putters))
        assert broker.stop() == 0, broker.read_log()
        acked: dict[tuple[int, int], bytes] = {}
        tried: set[bytes] = set()
        for putter in putters:
            putter.stopping.set()
            putter.join(30)
            acked.update(putter.accounts.acked)
            tried |= putter.accounts.tried
        assert acked
        broker.start()
        check(broker.port, acked, tried)
        assert broker.stop() == 0
