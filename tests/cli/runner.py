"""Runs commands in this process."""

from click.testing import CliRunner, Result

from metaq.cli.main import main
from tests.brokers import AnyBroker
from tests.client.memory_broker import MemoryBroker


def run(*words: str, broker: AnyBroker | MemoryBroker | None = None) -> Result:
    """Run `metaq WORDS`; with a broker, that one is asked."""
    target = ["--broker", f"127.0.0.1:{broker.port}"] if broker else []
    return CliRunner().invoke(main, [*words, *target])
