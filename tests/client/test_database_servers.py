"""Offsets in real databases: effects that SQL texts alone do not show.

Skipped on machines without such a server, or without a Python driver for it.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from metaq.client.errors import OffsetStoreError
from metaq.client.sql_offsets import TABLE, SqlOffsets
from metaq.model import MAX_OFFSET, BrokerId, TopicPartition
from tests.client.database_servers import DatabaseServer, mariadb, postgresql
from tests.client.stored_offsets import (
    FAR,
    ONE,
    ZERO,
    at,
    commit,
    listening,
    load,
    soon,
)

pytestmark = pytest.mark.slow

SERVERS = {"postgresql": postgresql, "mariadb": mariadb}
MEMBERS = 6
ROUNDS = 12


@pytest.fixture(scope="module", params=SERVERS)
def running(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def server(running: DatabaseServer) -> DatabaseServer:
    running.execute(f"DROP TABLE IF EXISTS {TABLE}")
    return running


def test_names_and_numbers_come_back_as_they_were(server: DatabaseServer) -> None:
    """Of any script, of 255 characters, apart by case and by accent; up to 63 bits."""
    store = SqlOffsets(server.url, create=True)
    groups = ["g", "G", "é", "e\u0301", "組", "😀" * 255, "%s:x\\", "a{b}"]
    far = TopicPartition("組" * 255, BrokerId(1023), 17)
    for number, group in enumerate(groups):
        offsets = {ZERO: at(number), ONE: at(MAX_OFFSET, 2**63 - 1)}
        commit(store, group, offsets | {FAR: at(0, -(2**63)), far: at(1)})
    for number, group in enumerate(groups):
        assert load(store, group, ZERO) == at(number)
        assert load(store, group, ONE) == at(MAX_OFFSET, 2**63 - 1)
        assert load(store, group, FAR) == at(0, -(2**63))
        assert load(store, group, far) == at(1)
    with pytest.raises(OffsetStoreError, match="too long"):
        commit(store, "g" * 256, {ZERO: at(1)})


@pytest.mark.parametrize("isolation", ["", "SERIALIZABLE"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_members_that_commit_at_once_all_get_through(
    server: DatabaseServer, isolation: str, is_shared: bool
) -> None:
    """First rows meet in deadlocks and conflicts; of shared ones none is mixed."""
    gate = threading.Barrier(MEMBERS)
    errors: list[Exception] = []

    def isolate(connection: sa.Connection) -> None:
        if isolation:
            connection.execution_options(isolation_level=isolation)

    def write(member: int) -> None:
        store = SqlOffsets(server.url, create=True)
        first = 0 if is_shared else 4 * member
        numbers = range(first, first + 4)
        partitions = [TopicPartition("t", BrokerId(0), number) for number in numbers]
        for number in range(ROUNDS):
            gate.wait(60)
            value = dict.fromkeys(partitions, at(number, member))
            try:
                commit(store, f"g{number}", value)
            except OffsetStoreError as error:
                errors.append(error)

    members = [threading.Thread(target=write, args=(one,)) for one in range(MEMBERS)]
    with listening(sa.Engine, "engine_connect", isolate):
        for member in members:
            member.start()
        for member in members:
            member.join(100)
    assert errors == []
    rows = server.execute(f"SELECT group_id, msg_id FROM {TABLE}")
    counts = Counter(rows)
    assert set(counts.values()) == {4}
    assert len(counts) == ROUNDS * (1 if is_shared else MEMBERS)


def test_a_server_that_was_restarted_is_found_again(server: DatabaseServer) -> None:
    """Between two calls, and under a transaction, which is made again."""
    store = SqlOffsets(server.url, create=True)
    updates = list[str]()

    def restart_behind(
        _connection: object, _cursor: object, statement: str, *_more: object
    ) -> None:
        if statement.startswith("UPDATE"):
            updates.append(statement)
            if len(updates) == 1:
                server.end()
                server.start()

    async def scenario() -> None:
        await store.commit("g", {ZERO: at(1)}, fence=None, deadline_s=soon())
        server.end()
        with pytest.raises(OffsetStoreError):
            await store.commit("g", {ZERO: at(2)}, fence=None, deadline_s=soon())
        server.start()
        assert await store.load("g", ZERO, deadline_s=soon()) == at(1)
        with listening(sa.Engine, "after_cursor_execute", restart_behind):
            await store.commit("g", {ZERO: at(3)}, fence=None, deadline_s=soon() + 50)
        assert len(updates) == 2
        assert await store.load("g", ZERO, deadline_s=soon()) == at(3)
        await store.close()

    asyncio.run(scenario())


def test_a_table_that_java_members_use_is_shared(server: DatabaseServer) -> None:
    """Names of the database's own kind: where it takes G for g, `g` is refused."""
    quote = "`" if server.url.startswith("mysql") else '"'
    server.execute(
        f"CREATE TABLE {TABLE} (topic varchar(255) NOT NULL, {quote}partition{quote}"
        f" varchar(100) NOT NULL, group_id varchar(255) NOT NULL,"
        f" {quote}offset{quote} bigint NOT NULL, msg_id bigint NOT NULL,"
        f" UNIQUE (topic, {quote}partition{quote}, group_id))",
        f"INSERT INTO {TABLE} VALUES ('t', '0-1', 'G', 40, 3)",
    )
    assert load(SqlOffsets(server.url), "G", ONE) == at(40, 3)
    commit(SqlOffsets(server.url), "G", {ONE: at(80, 4), ZERO: at(1)})
    rows = server.execute(f"SELECT * FROM {TABLE} ORDER BY 2")
    assert rows == [("t", "0-0", "G", 1, -1), ("t", "0-1", "G", 80, 4)]
    if server.url.startswith("mysql"):
        with pytest.raises(OffsetStoreError, match="expected the row of"):
            load(SqlOffsets(server.url), "g", ONE)
    else:
        assert load(SqlOffsets(server.url), "g", ONE) is None
