"""MetaQ's own Java consumers and ours in one group: they share, and hand over.

Two brokers, load from both kinds of producer. A message that ours has handled comes to
no member again. Of Java this is not asked: it interrupts what it handles, and does not
commit it; what it delivers twice within one machine it hides by a cache of ids.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.client import Client
from metaq.testing.proxy import Proxy
from tests.java.client import JavaClient
from tests.java.conftest import until_registered
from tests.java.group_members import Book, JavaMember, Member, OurMember, Senders
from tests.java.jvm import Jvm
from tests.matrix.scene import broker_arguments
from tests.rigs.process import BrokerProcess
from tests.rigs.waiting import wait_until

TOPICS = {"DEFAULT": 11, "CONSIST": 11, "expiring": 3}
"""Partitions on each broker: 1-10 is between 1-1 and 1-2."""
SHORT_SESSION_MS = 2_000


@pytest.fixture(scope="module")
def brokers(
    java_zookeeper: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Run two brokers, whose topics are those of this module."""
    root = tmp_path_factory.mktemp("java-groups")
    with ExitStack() as stack:
        for number in (1, 2):
            arguments = broker_arguments(java_zookeeper, number, TOPICS)
            broker = BrokerProcess(
                root / f"broker-{number}", topic="unused", arguments=arguments
            )
            until_registered(stack.enter_context(broker))
        yield


class Group:
    """A topic, the group of its name, and who is in it."""

    def __init__(self, jvm: Jvm, zookeeper: str, topic: str, strategy: str) -> None:
        self.book = Book()
        self.members: dict[str, Member] = {}
        self._jvm = jvm
        self._zookeeper = zookeeper
        self._topic = topic
        self._strategy = strategy

    def join_java(
        self, name: str, zookeeper: str | None = None, **options: int
    ) -> None:
        self.members[name] = JavaMember(
            self._jvm,
            zookeeper or self._zookeeper,
            name,
            self._topic,
            self._strategy,
            self.book,
            **options,
        )
        self.settle()

    def join_ours(self, name: str) -> None:
        self.members[name] = OurMember(
            self._zookeeper, name, self._topic, self._strategy, self.book
        )
        self.settle()

    def leave(self, name: str) -> None:
        self.members.pop(name).leave()
        self.settle()

    def settle(self) -> None:
        """Wait until each member owns a partition, and each partition has an owner."""
        if not self.members:
            return
        client = KazooClient(self._zookeeper)
        client.start()
        try:
            wait_until(lambda: self._is_settled(client))
        finally:
            client.stop()
            client.close()

    def _is_settled(self, client: KazooClient) -> bool:
        root = f"/meta/consumers/{self._topic}/owners/{self._topic}"
        try:
            nodes = [f"{root}/{name}" for name in client.get_children(root)]
            owners = [client.get(node)[0].decode() for node in nodes]
        except NoNodeError:
            return False
        wanted = {f"{self._topic}_{name}" for name in self.members}
        return len(owners) == 2 * TOPICS[self._topic] and set(owners) == wanted


@pytest.mark.parametrize("strategy", ["DEFAULT", "CONSIST"])
def test_members_of_both_kinds_come_and_go(
    brokers: None,
    jvm: Jvm,
    java: JavaClient,
    ours: Client,
    java_zookeeper: str,
    strategy: str,
) -> None:
    """Nothing lost, order kept, and nothing that ours handled comes again."""
    group = Group(jvm, java_zookeeper, strategy, strategy)
    senders = Senders(java, ours, strategy)
    # Names that come first and last: each time other parts move.
    group.join_java("m-java")
    group.join_ours("a-ours")
    group.join_ours("z-ours")
    group.leave("m-java")
    group.join_java("b-java")
    group.join_java("zz-java")
    group.leave("a-ours")
    group.leave("zz-java")
    group.leave("z-ours")
    group.join_ours("a-ours")
    group.leave("b-java")
    senders.stop()
    wait_until(lambda: senders.acked <= group.book.data())
    group.leave("a-ours")
    assert group.book.is_in_order()
    of_ours = [one for one in group.book.repeats() if one[0].endswith("-ours")]
    assert of_ours == []
    groups = {row.member for row in group.book.rows}
    assert groups == {"m-java", "a-ours", "z-ours", "b-java", "zz-java"}


def test_a_java_member_whose_session_expires_comes_back(
    brokers: None,
    jvm: Jvm,
    java: JavaClient,
    ours: Client,
    java_zookeeper: str,
) -> None:
    """Ours takes over what it read, and gives it back; nothing is lost on the way."""
    host, _, root = java_zookeeper.partition("/")
    name, _, port = host.partition(":")
    group = Group(jvm, java_zookeeper, "expiring", "DEFAULT")
    senders = Senders(java, ours, "expiring")
    with Proxy(name, int(port)) as proxy:
        group.join_ours("ours")
        group.join_java(
            "java",
            f"127.0.0.1:{proxy.port}/{root}",
            session_timeout_ms=SHORT_SESSION_MS,
        )
        member = group.members.pop("java")
        proxy.stall()
        group.settle()
        group.members["java"] = member
        proxy.pass_all()
        group.settle()
        senders.stop()
        wait_until(lambda: senders.acked <= group.book.data())
        group.leave("java")
    group.leave("ours")
    assert group.book.is_in_order()
