"""Runs commands in this process."""

from click.testing import CliRunner, Result

from metaq.cli.main import main
from metaq.model import MessageId
from metaq.record.ids import EPOCH_MS, MS_SHIFT
from tests.brokers import AnyBroker
from tests.client.memory_broker import MemoryBroker


def run(*words: str, broker: AnyBroker | MemoryBroker | None = None) -> Result:
    """Run `metaq WORDS`; with a broker, that one is asked."""
    target = ["--broker", f"127.0.0.1:{broker.port}"] if broker else []
    return CliRunner().invoke(main, [*words, *target])


def id_at(wall_ms: int, sequence: int = 0) -> MessageId:
    """Return the id of a message that was stored at some time."""
    return MessageId(((wall_ms - EPOCH_MS) << MS_SHIFT) | sequence)
