"""Received damage is compared with the broker's bytes before it counts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.broker.handlers.check import CHECKS_MAX
from metaq.client.consume.cursor import AGAIN_MAX
from metaq.client.offsets.offset_store import MemoryOffsets
from metaq.errors import CorruptRecordError
from metaq.model import GroupOffset, Offset
from tests.brokers import AnyBroker, Metaq14Broker, PythonBroker, StartBroker
from tests.client.worlds import IDLE, QUICK, WORLDS, partition, payloads, take
from tests.rigs.flipping import FlippingProxy
from tests.rigs.inside import running_inside
from tests.rigs.waiting import wait_until

ZERO = partition(0)
DATA = [b"first", b"second", b"third", b"fourth"]
ALWAYS = 1 << 30
POLICIES: list[Any] = ["stop", "skip"]


@pytest.fixture
def broker(start_broker: StartBroker) -> AnyBroker:
    return start_broker({"test": 1})


@pytest.fixture
def offsets(broker: AnyBroker) -> list[int]:
    return [broker.put(one)[0] for one in DATA]


@pytest.fixture
def proxy(broker: AnyBroker, offsets: list[int]) -> Iterator[FlippingProxy]:
    # Damage after good records is got again anyway: those are handed out first.
    with FlippingProxy(broker.port, b"second", left=2) as one:
        yield one


@pytest.fixture(params=WORLDS)
def client(request: pytest.FixtureRequest, proxy: FlippingProxy) -> Iterator[Any]:
    with WORLDS[request.param](brokers=[str(proxy.address)], **QUICK) as one:
        yield one


def segment_of(broker: AnyBroker) -> Path:
    assert isinstance(broker, PythonBroker)
    (path,) = broker.inner.data_path.glob("**/test-0/*.meta")
    return path


def is_asked(broker: AnyBroker) -> bool:
    """Tell whether a broker announces that it can be asked; the other one must not."""
    if isinstance(broker, Metaq14Broker):
        assert broker.inner.statistics().unknown_count == 0
    return broker.has_extensions


@pytest.mark.parametrize("policy", POLICIES)
def test_a_bit_that_flips_on_the_way_costs_one_get(
    broker: AnyBroker, client: Any, offsets: list[int], policy: Any
) -> None:
    """Nothing is lost and the log goes on; a MetaQ 1.4 broker cannot be asked."""
    options = {"on_corrupt": policy, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 1)) == DATA[:1]
        if is_asked(broker):
            assert payloads(take(consumer, 3)) == DATA[1:]
            broker.put(b"fifth")
            assert payloads(take(consumer, 1)) == [b"fifth"]
        elif policy == "skip":
            assert payloads(take(consumer, 2)) == DATA[2:]
        else:
            with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}"):
                take(consumer, 1)
        counts = consumer.statistics().fetches[ZERO]
    assert counts.again_count == is_asked(broker)
    assert counts.skipped_count == (policy == "skip" and not is_asked(broker))
    assert counts.error_count == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_what_always_comes_damaged_is_got_a_few_times(
    broker: AnyBroker,
    client: Any,
    proxy: FlippingProxy,
    offsets: list[int],
    policy: Any,
) -> None:
    """Then `on_corrupt` applies although the broker calls its bytes good."""
    proxy.left = ALWAYS
    options = {"on_corrupt": policy, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 1)) == DATA[:1]
        if policy == "skip":
            assert payloads(take(consumer, 2)) == DATA[2:]
        else:
            with pytest.raises(CorruptRecordError) as caught:
                take(consumer, 1)
            assert caught.value.offset == offsets[1]
            assert caught.value.next_good_offset == offsets[2]
        counts = consumer.statistics().fetches[ZERO]
    again_max = AGAIN_MAX if is_asked(broker) else 0
    assert counts.again_count == again_max
    # The first one may come with the record before it, or not.
    assert again_max + 1 <= proxy.flip_count <= again_max + 2


@pytest.mark.slow
def test_a_stored_offset_within_a_message_is_not_called_damage(
    broker: AnyBroker, client: Any, proxy: FlippingProxy, offsets: list[int]
) -> None:
    """As from a table in which Kafka's `offset + 1` was stored."""
    proxy.left = 0
    store = MemoryOffsets()
    wrong = GroupOffset(Offset(offsets[1] + 1))
    asyncio.run(store.commit("g", {ZERO: wrong}, fence=None, deadline_s=0.0))
    with client.consumer("g", ["test"], offsets=store, **IDLE) as consumer:
        with pytest.raises(CorruptRecordError) as caught:
            take(consumer, 1)
        assert consumer.health().problems == (str(caught.value),)
    assert caught.value.offset == wrong.offset
    assert caught.value.next_good_offset == offsets[2]
    is_sure = f"no message begins at offset {wrong.offset}" in str(caught.value)
    assert is_sure == is_asked(broker)


@pytest.mark.parametrize("policy", POLICIES)
def test_damage_on_the_disk_is_the_brokers_to_name(
    broker: AnyBroker,
    client: Any,
    proxy: FlippingProxy,
    offsets: list[int],
    policy: Any,
) -> None:
    """With its file, and where reading can go on."""
    proxy.left = 0
    if not is_asked(broker):
        pytest.skip("it knows of no damage of its own")
    path = segment_of(broker)
    with path.open("r+b") as file:
        file.seek(offsets[2] - 1)
        file.write(b"D")
    options = {"on_corrupt": policy, **IDLE}
    with client.consumer("g", ["test"], **options) as consumer:
        assert payloads(take(consumer, 1)) == DATA[:1]
        if policy == "skip":
            assert payloads(take(consumer, 2)) == DATA[2:]
            assert consumer.statistics().missing_bytes == offsets[2] - offsets[1]
        else:
            with pytest.raises(CorruptRecordError) as caught:
                take(consumer, 1)
            assert caught.value.path == str(path)
            assert caught.value.partition == ZERO
            assert caught.value.offset == offsets[1]
            assert caught.value.next_good_offset == offsets[2]
        counts = consumer.statistics().fetches[ZERO]
    assert counts.again_count == 0
    assert counts.error_count == 0


@pytest.mark.slow
def test_a_broker_that_cannot_say_it_now_is_asked_again(
    broker: AnyBroker, client: Any, proxy: FlippingProxy
) -> None:
    """After pauses, as after other refusals; `on_corrupt` waits for the answer."""
    if not is_asked(broker):
        pytest.skip("it is not asked")
    assert isinstance(broker, PythonBroker)
    proxy.left = ALWAYS
    running_inside(broker.inner).context.check_count = CHECKS_MAX
    with client.consumer("g", ["test"], on_corrupt="skip", **IDLE) as consumer:
        assert payloads(take(consumer, 1)) == DATA[:1]
        wait_until(
            lambda: (
                consumer.statistics().fetches[ZERO].error_count > AGAIN_MAX
                and f"{CHECKS_MAX} checks are not answered yet"
                in " ".join(consumer.health().problems)
            )
        )
        proxy.left = 0
        assert payloads(take(consumer, 3)) == DATA[1:]
        counts = consumer.statistics().fetches[ZERO]
        wait_until(lambda: consumer.health().is_ok)
    assert (counts.again_count, counts.skipped_count) == (0, 0)


def test_browsers_and_single_gets_ask_as_well(
    broker: AnyBroker, client: Any, proxy: FlippingProxy, offsets: list[int]
) -> None:
    """And raise what a consumer would stop for."""
    if is_asked(broker):
        assert payloads(list(client.browse("test"))) == DATA
        proxy.left = 1
        found = client.get("test", "0-0", offsets[1], 1000)
        assert payloads(found.messages) == DATA[1:]
    proxy.left = ALWAYS
    with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}"):
        list(client.browse("test"))
    with pytest.raises(CorruptRecordError, match=f"offset {offsets[1]}"):
        client.get("test", "0-0", offsets[1], 1000)
    is_asked(broker)
