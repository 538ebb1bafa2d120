"""Names for users: all are in `metaq.client`, and typed."""

import builtins
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import metaq.client
import metaq.client.errors
import metaq.errors
import metaq.zk.errors

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio

from metaq.client import (
    AsyncClient,
    BufferFullError,
    Client,
    Health,
    HandlerFailedError,
    Lag,
    Message,
    MetaqError,
    OutcomeUnknownError,
    OwnershipLostError,
    PendingResult,
    RetryPolicy,
    SendResult,
    TopicPartition,
)
from metaq.client.errors import StuckError


def publish(client: Client) -> SendResult | None:
    with client.producer(linger_s=0.01, when_full="raise") as producer:
        try:
            future = producer.send_nowait("test", b"more", key="k")
            producer.send_many("test", [b"a", b"b"], timeout=5)[0].offset
            with producer.transaction(timeout=30) as tx:
                pending: PendingResult = tx.send("test", b"c", headers={"h": b"1"})
                tx.send_many("test", [b"d"])[0].message_id
                print(tx.id, pending.partition)
            return future.result(30)
        except (BufferFullError, OutcomeUnknownError) as error:
            print(error)
    return None


def consume(client: Client) -> dict[TopicPartition, Lag]:
    with client.consumer("group-1", ["test"], start="latest") as consumer:
        try:
            for message in consumer:
                text: str = message.data.decode()
                print(text, message.attribute, message.offset)
                break
            consumer.commit()
            offsets: dict[str, int] = {"0-1": 42}
            consumer.commit(offsets)
            consumer.seek("0-1", 42)
            client.get("test", "0-1", 42)
            consumer.seek(TopicPartition("test", 0, 1), 42)
            next(client.browse("test", start=42), None)
        except (OwnershipLostError, StuckError) as error:
            print(error)
        health: Health = consumer.health()
        print(health.is_ok)
        return consumer.lag(timeout=5)


async def main() -> None:
    async with AsyncClient(brokers=["127.0.0.1:8123"]) as client:
        async with client.producer() as producer:
            result: SendResult = await producer.send("test", b"hello")
            print(result.message_id)
        async with client.consumer("group-1", ["test"]) as consumer:

            async def handle(message: Message) -> None:
                await asyncio.sleep(0)

            try:
                await consumer.run(handle, concurrency=2, retry=RetryPolicy())
            except HandlerFailedError as error:
                print(error.message.id, error.attempts)
            except MetaqError as error:
                print(error.retriable)
"""

WRONG = """
import metaq.spark
from metaq.client import Client, KafkaConsumer

metaq.spark.load()
with Client("127.0.0.1:2181", request_timeout_s="5") as client:
    with client.producer(linger=1) as producer:
        size: int = producer.send("test", "text")
"""


CheckTypes = Callable[[str], str]


@pytest.fixture(scope="module")
def check_types(tmp_path_factory: pytest.TempPathFactory) -> CheckTypes:
    """Return what says what `mypy --strict` says of a program of a user.

    Its notes on this package are made once.
    """
    path = tmp_path_factory.mktemp("programs")
    return lambda program: _checked(program, path)


def _checked(program: str, path: Path) -> str:
    script = path / "program.py"
    script.write_text(program)
    # Of what is installed a user hears types, not what is wrong inside.
    arguments = ["--strict", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, f"--cache-dir={path}", str(script)],
        env={**os.environ, "MYPYPATH": str(ROOT)},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_typed_program_of_a_user_passes_the_type_checker(
    check_types: CheckTypes,
) -> None:
    assert "Success" in check_types(PROGRAM)


@pytest.mark.slow
def test_mistakes_of_a_user_are_found_by_the_type_checker(
    check_types: CheckTypes,
) -> None:
    """The names are not just any names: their types are known."""
    found = check_types(WRONG)
    assert re.findall(r"\[([a-z-]+)\]$", found, re.MULTILINE) == [
        "attr-defined",
        "attr-defined",
        "arg-type",
        "call-arg",
        "assignment",
        "arg-type",
    ], found


def test_all_names_are_there_once_and_in_order() -> None:
    names = metaq.client.__all__
    assert names == sorted(set(names))
    assert all(hasattr(metaq.client, name) for name in names)


ACTED_ON = [
    "AlreadySettledError",
    "BufferFullError",
    "ClosedError",
    "ConfigError",
    "CoordinationError",
    "CorruptRecordError",
    "ExchangeError",
    "GroupInUseError",
    "HandlerFailedError",
    "HeuristicError",
    "LeaseLostError",
    "LostBranchError",
    "MessageTooLargeError",
    "MetaqError",
    "NoBrokerError",
    "NoDelayError",
    "NoExchangesError",
    "NoMailboxError",
    "NoQueuesError",
    "NoTopicError",
    "OutcomeUnknownError",
    "OwnershipLostError",
    "PartitionsAwayError",
    "PartlySentError",
    "QueueGroupError",
    "ReplyTimeoutError",
    "RequestTimeoutError",
    "TopicExistsError",
    "TransactionError",
    "TransactionInDoubtError",
    "TransactionRolledBackError",
    "UnknownXidError",
    "UnroutableError",
]


def test_the_errors_that_programs_act_on_are_exported_and_no_others() -> None:
    """Another one needs something that a caller does about it and about no base."""
    exported = [name for name in metaq.client.__all__ if name.endswith("Error")]
    assert exported == ACTED_ON


def test_every_error_that_a_docstring_promises_is_in_a_module_of_errors() -> None:
    promised = {
        word
        for text in public_texts()
        for word in re.findall(r"\w+Error\b", text)
        if not hasattr(builtins, word)
    }
    assert {"OutcomeUnknownError", "ClosedError", "ForbiddenError"} <= promised
    modules = (metaq.errors, metaq.client.errors, metaq.zk.errors)
    for name in promised:
        assert any(hasattr(module, name) for module in modules), name


def public_texts() -> Iterator[str]:
    """Yield the docstrings of everything that users call."""
    for name in metaq.client.__all__:
        value = getattr(metaq.client, name)
        if not inspect.isclass(value):
            continue
        for member_name, member in inspect.getmembers(value):
            if not member_name.startswith("_"):
                yield inspect.getdoc(member) or ""
