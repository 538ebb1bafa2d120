"""Contract of all offset stores, and peculiarities of tables."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from metaq.client.errors import OffsetStoreError
from metaq.client.offsets.file_offsets import FileOffsets
from metaq.client.offsets.offset_store import (
    MemoryOffsets,
    OffsetStore,
    ZooKeeperOffsets,
)
from metaq.client.sql_offsets import TABLE, SqlOffsets
from metaq.errors import ConfigError
from metaq.model import MAX_OFFSET, BrokerId, GroupOffset, Offset, TopicPartition
from metaq.testing.zk import MemoryZooKeeper
from metaq.zk.paths import NodePaths, normalize_root
from metaq.zk.session import SessionState
from tests.client.stored_offsets import (
    CLOCK,
    FAR,
    ONE,
    ZERO,
    at,
    commit,
    listening,
    load,
    run,
    soon,
)

Make = Callable[[], OffsetStore]


class InZooKeeper:
    """A session for each call: `run` ends its loop after every one."""

    def __init__(self, zookeeper: MemoryZooKeeper) -> None:
        self._zookeeper = zookeeper

    @contextlib.asynccontextmanager
    async def _store(self) -> AsyncIterator[ZooKeeperOffsets]:
        coordinator = self._zookeeper.coordinator(CLOCK)
        coordinator.start()
        try:
            while coordinator.status.state is not SessionState.CONNECTED:
                await asyncio.sleep(0)
            yield ZooKeeperOffsets(coordinator, NodePaths(normalize_root("/meta")))
        finally:
            await coordinator.stop(deadline_s=soon())

    async def load(self, *args: Any, **named: Any) -> GroupOffset | None:
        async with self._store() as store:
            return await store.load(*args, **named)

    async def commit(self, *args: Any, **named: Any) -> Any:
        async with self._store() as store:
            return await store.commit(*args, **named)

    async def close(self) -> None:
        """Every call has closed its own."""


@pytest.fixture(params=["memory", "file", "sql", "zookeeper"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return what opens the same store again and again."""
    if request.param == "memory":
        memory = MemoryOffsets()
        return lambda: memory
    if request.param == "file":
        return lambda: FileOffsets(tmp_path / "offsets")
    if request.param == "zookeeper":
        zookeeper = MemoryZooKeeper()
        return lambda: InZooKeeper(zookeeper)
    url = f"sqlite:///{tmp_path / 'offsets.db'}"
    return lambda: SqlOffsets(url, create=True)


# -- every store ----------------------------------------------------------------------


def test_nothing_is_stored_at_first(make: Make) -> None:
    assert load(make(), "g", ZERO) is None


def test_what_was_committed_is_there_for_the_next_one(make: Make) -> None:
    extremes = {ZERO: at(0), ONE: at(MAX_OFFSET, 2**63 - 1), FAR: at(7, -(2**63))}
    assert commit(make(), "g", extremes) == {}
    for partition, offset in extremes.items():
        assert load(make(), "g", partition) == offset


def test_a_later_commit_replaces_an_earlier_one_and_nothing_else(make: Make) -> None:
    commit(make(), "g", {ZERO: at(10), ONE: at(20)})
    commit(make(), "h", {ZERO: at(30)})
    commit(make(), "g", {ZERO: at(5, 4)})  # going back is a seek
    assert load(make(), "g", ZERO) == at(5, 4)
    assert load(make(), "g", ONE) == at(20)
    assert load(make(), "h", ZERO) == at(30)


def test_committing_nothing_stores_nothing(make: Make) -> None:
    assert commit(make(), "g", {}) == {}
    assert load(make(), "g", ZERO) is None


def test_a_closed_store_can_be_used_by_the_next_consumer(make: Make) -> None:
    store = make()
    commit(store, "g", {ZERO: at(1)})
    commit(store, "g", {ZERO: at(2)})
    assert load(store, "g", ZERO) == at(2)


def test_an_offset_without_a_message_is_kept(make: Make) -> None:
    commit(make(), "g", {ZERO: GroupOffset(Offset(9))})
    assert load(make(), "g", ZERO).offset == 9


def test_many_at_once_all_arrive(make: Make) -> None:
    partitions = [TopicPartition("t", BrokerId(0), n) for n in range(50)]

    async def scenario(store: OffsetStore) -> list[GroupOffset | None]:
        await asyncio.gather(
            *(
                store.commit("g", {p: at(p.partition)}, fence=None, deadline_s=soon())
                for p in partitions
            )
        )
        loads = (store.load("g", p, deadline_s=soon()) for p in partitions)
        return await asyncio.gather(*loads)

    assert run(make(), scenario) == [at(p.partition) for p in partitions]


def test_no_thread_stays_behind(make: Make) -> None:
    before = set(threading.enumerate())
    commit(make(), "g", {ZERO: at(1)})
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


# -- tables ---------------------------------------------------------------------------

JAVA_TABLE = f"""
CREATE TABLE {TABLE} (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  topic varchar(255) NOT NULL,
  "partition" varchar(255) NOT NULL,
  group_id varchar(255) NOT NULL,
  "offset" bigint NOT NULL,
  msg_id bigint NOT NULL,
  CONSTRAINT one UNIQUE (topic, "partition", group_id)
)
"""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[tuple[str, sa.Engine]]:
    url = f"sqlite:///{tmp_path / 'offsets.db'}"
    engine = sa.create_engine(url)
    yield url, engine
    engine.dispose()


def execute(engine: sa.Engine, text: str) -> list[Any]:
    with engine.begin() as connection:
        result = connection.execute(sa.text(text))
        return [tuple(row) for row in result] if result.returns_rows else []


def test_a_table_of_java_s_making_is_read_and_written(
    database: tuple[str, sa.Engine],
) -> None:
    url, engine = database
    execute(engine, JAVA_TABLE)
    execute(
        engine,
        f'INSERT INTO {TABLE} (topic, "partition", group_id, "offset", msg_id)'
        " VALUES ('t', '0-1', 'g', 40, 3)",
    )
    assert load(SqlOffsets(url), "g", ONE) == at(40, 3)
    commit(SqlOffsets(url), "g", {ONE: at(80, 4), ZERO: at(1)})
    rows = execute(
        engine, f'SELECT topic, "partition", group_id, "offset", msg_id FROM {TABLE}'
    )
    assert rows == [("t", "0-1", "g", 80, 4), ("t", "0-0", "g", 1, -1)]


@pytest.mark.slow
def test_a_missing_table_is_an_error_unless_it_shall_be_made(
    database: tuple[str, sa.Engine],
) -> None:
    url, _engine = database
    with pytest.raises(OffsetStoreError, match=TABLE):
        load(SqlOffsets(url), "g", ZERO)
    with pytest.raises(OffsetStoreError, match="other"):
        commit(SqlOffsets(url, "other"), "g", {ZERO: at(1)})
    commit(SqlOffsets(url, "other", create=True), "g", {ZERO: at(1)})
    assert load(SqlOffsets(url, "other"), "g", ZERO) == at(1)


@pytest.mark.slow
def test_a_commit_is_one_transaction(database: tuple[str, sa.Engine]) -> None:
    """When one row is refused, none is stored, and the error says so for all."""
    url, engine = database
    commit(SqlOffsets(url, create=True), "g", {ZERO: at(1)})
    execute(
        engine,
        f"CREATE TRIGGER refuse BEFORE INSERT ON {TABLE} WHEN NEW.\"partition\" = '0-1'"
        " BEGIN SELECT RAISE(FAIL, 'no such luck'); END",
    )
    with pytest.raises(OffsetStoreError):
        commit(SqlOffsets(url), "g", {ZERO: at(2), ONE: at(2)})
    assert load(SqlOffsets(url), "g", ZERO) == at(1)


def test_a_row_that_another_process_inserts_meanwhile_is_updated(
    database: tuple[str, sa.Engine],
) -> None:
    url, _engine = database
    store = SqlOffsets(url, create=True)
    commit(store, "other", {ZERO: at(1)})
    updates = []

    def insert_behind_the_first(
        connection: sa.Connection, _cursor: Any, statement: str, *_more: Any
    ) -> None:
        if statement.startswith("UPDATE"):
            updates.append(statement)
            if len(updates) == 1:
                connection.exec_driver_sql(
                    f"INSERT INTO {TABLE} VALUES ('t', '0-0', 'g', 1, -1)"
                )

    with listening(sa.Engine, "after_cursor_execute", insert_behind_the_first):
        commit(store, "g", {ZERO: at(2)})
    assert len(updates) == 2
    assert load(store, "g", ZERO) == at(2)


def test_two_that_create_the_table_at_once_both_go_on(
    database: tuple[str, sa.Engine],
) -> None:
    url, _engine = database
    other, seen = SqlOffsets(url, create=True), []

    def create_first(table: sa.Table, *_more: Any, **_named: Any) -> None:
        seen.append(table.name)
        if len(seen) == 1:
            commit(other, "g", {ZERO: at(1)})

    with listening(sa.Table, "before_create", create_first):
        assert load(SqlOffsets(url, create=True), "g", ZERO) == at(1)
    assert seen == [TABLE, TABLE]


def test_a_value_that_is_no_offset_is_an_error(
    database: tuple[str, sa.Engine],
) -> None:
    url, engine = database
    commit(SqlOffsets(url, create=True), "g", {ZERO: at(1)})
    execute(engine, f'UPDATE {TABLE} SET "offset" = -3, msg_id = NULL')
    with pytest.raises(OffsetStoreError, match="from 0 to 9223372036854775807, got -3"):
        load(SqlOffsets(url), "g", ZERO)
    execute(engine, f'UPDATE {TABLE} SET "offset" = 3')
    assert load(SqlOffsets(url), "g", ZERO) == at(3)


@pytest.mark.slow
def test_errors_name_the_database_and_not_the_password() -> None:
    store = SqlOffsets("sqlite:////no/such/directory/x.db")
    with pytest.raises(OffsetStoreError, match=r"/no/such/directory/x\.db"):
        load(store, "g", ZERO)
    for url in ("no url with secret", "nodialect://user:secret@host/db"):
        with pytest.raises(ConfigError) as caught:
            SqlOffsets(url)
        assert "secret" not in str(caught.value)


@pytest.mark.slow
def test_without_sqlalchemy_one_sentence_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import metaq.client\n"
        "import metaq.client.sql_offsets"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].endswith(
        "offsets in a database need SQLAlchemy, which is not installed:"
        " pip install 'metaq[sql]'"
    )
