"""Offsets in a database: differences of databases, and concurrent writers."""

import asyncio
import multiprocessing
import sqlite3
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mssql, mysql, oracle, postgresql
from sqlalchemy.dialects.mysql import mariadb
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.schema import CreateTable

from metaq.client import sql_offsets
from metaq.client.errors import OffsetStoreError
from metaq.client.sql_offsets import TABLE, TRANSACTION_TRIES, SqlOffsets, offsets_table
from metaq.clock import SystemClock
from metaq.errors import ConfigError, MetaqError
from metaq.model import BrokerId, GroupOffset, MessageId, Offset, TopicPartition
from metaq.retry import Backoff
from metaq.testing.clock import ManualClock
from tests.client.stored_offsets import listening

CLOCK = SystemClock()
PARTITIONS = [TopicPartition("t", BrokerId(0), number) for number in range(8)]
ZERO = PARTITIONS[0]


def at(offset: int, message_id: int = -1) -> GroupOffset:
    return GroupOffset(Offset(offset), MessageId(message_id))


def commit(
    store: SqlOffsets, group: str, offsets: Mapping[TopicPartition, GroupOffset]
) -> None:
    async def scenario() -> Mapping[TopicPartition, MetaqError]:
        deadline_s = CLOCK.monotonic_s() + 30
        try:
            return await store.commit(group, offsets, fence=None, deadline_s=deadline_s)
        finally:
            await store.close()

    assert asyncio.run(scenario()) == {}


def load(store: SqlOffsets, group: str, partition: TopicPartition) -> Any:
    async def scenario() -> GroupOffset | None:
        try:
            deadline_s = CLOCK.monotonic_s() + 30
            return await store.load(group, partition, deadline_s=deadline_s)
        finally:
            await store.close()

    return asyncio.run(scenario())


# -- the text that each database gets -------------------------------------------------

BYTEWISE = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
DIALECTS: list[tuple[Any, str, str, str, str]] = [
    # dialect, type of names, of numbers, how partition and offset are written
    (mysql.dialect(), f"VARCHAR(255) {BYTEWISE}", "BIGINT", "`partition`", "offset"),
    (
        mariadb.MariaDBDialect(),
        f"VARCHAR(255) {BYTEWISE}",
        "BIGINT",
        "`partition`",
        "`offset`",
    ),
    (postgresql.dialect(), "VARCHAR(255)", "BIGINT", "partition", '"offset"'),
    # Quoted names would be of another case than those of a table of MetaQ's making.
    (oracle.dialect(), "VARCHAR2(255 CHAR)", "NUMBER(19)", "partition", "offset"),
    (
        mssql.dialect(),
        "NVARCHAR(255) COLLATE Latin1_General_100_BIN2",
        "BIGINT",
        "partition",
        "offset",
    ),
]


@pytest.mark.parametrize(("dialect", "name", "number", "partition", "offset"), DIALECTS)
def test_every_database_gets_metaq_s_table_in_its_own_words(
    dialect: Any, name: str, number: str, partition: str, offset: str
) -> None:
    """Names are told apart byte by byte; numbers hold 63 bits."""
    text = " ".join(
        str(CreateTable(offsets_table(TABLE)).compile(dialect=dialect)).split()
    )
    may_be_null = (
        f"msg_id {number} NULL" if dialect.name == "mssql" else f"msg_id {number}"
    )
    assert text == (
        f"CREATE TABLE {TABLE} ( topic {name} NOT NULL, {partition} {name} NOT NULL,"
        f" group_id {name} NOT NULL, {offset} {number} NOT NULL, {may_be_null},"
        f" PRIMARY KEY (topic, {partition}, group_id) )"
    )


@pytest.mark.parametrize(("dialect", "name", "number", "partition", "offset"), DIALECTS)
def test_every_database_gets_words_that_it_does_not_keep_for_itself(
    dialect: Any, name: str, number: str, partition: str, offset: str
) -> None:
    """Only standard selects, updates and inserts by key are sent."""
    table = offsets_table(TABLE)
    is_row = table.c.partition == "0-1"
    names = {"topic": "t", "partition": "0-1", "group_id": "g"}
    for statement, expected in [
        (table.select().where(is_row), f"{TABLE}.{partition} = "),
        (table.update().where(is_row).values(offset=1), f"SET {offset}="),
        (
            table.insert().values(offset=1, msg_id=2, **names),
            f"(topic, {partition}, group_id, {offset}, msg_id) VALUES",
        ),
    ]:
        assert expected in str(statement.compile(dialect=dialect))


# -- what databases answer ------------------------------------------------------------


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make those between two tries short."""
    short = Backoff(first_s=1e-6, max_s=1e-6)
    monkeypatch.setattr(sql_offsets, "BACKOFF", short)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'offsets.db'}"


def execute(url: str, *texts: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for text in texts:
            connection.execute(sa.text(text))
    engine.dispose()


def columns_of(kind: str) -> str:
    return (
        f'CREATE TABLE {TABLE} (topic {kind}, "partition" {kind}, group_id {kind},'
        ' "offset" {0}, msg_id {0})'
    )


def test_a_table_that_takes_one_group_for_another_is_refused(url: str) -> None:
    """The default of MySQL and SQL Server: both groups would move one offset."""
    execute(url, columns_of("TEXT COLLATE NOCASE").format("BIGINT"))
    commit(SqlOffsets(url), "G", {ZERO: at(1)})
    with pytest.raises(OffsetStoreError, match=r"\['t', '0-0', 'g'\], got .*'G'\]"):
        load(SqlOffsets(url), "g", ZERO)
    assert load(SqlOffsets(url), "G", ZERO) == at(1)


def test_decimals_are_read_as_numbers(url: str) -> None:
    sqlite3.register_converter("NUMBER", lambda text: Decimal(text.decode()))
    execute(url, columns_of("TEXT").format("NUMBER"))
    commit(SqlOffsets(url), "g", {ZERO: at(2**62, 7)})
    found = load(SqlOffsets(f"{url}?detect_types={sqlite3.PARSE_DECLTYPES}"), "g", ZERO)
    assert found == at(2**62, 7)
    assert type(found.offset) is int


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_updated_rows_that_says_nothing_is_checked(
    url: str, count: int
) -> None:
    """Some databases count what became different, and some drivers do not count."""
    commit(SqlOffsets(url, create=True), "g", {ZERO: at(1)})
    asked: list[str] = []

    class Cursor(sqlite3.Cursor):
        @property
        def rowcount(self) -> int:
            asked.append("rowcount")
            return count

    class Connection(sqlite3.Connection):
        def cursor(self, *_factory: Any) -> Any:
            return super().cursor(Cursor)

    def connect(_dialect: Any, _record: Any, places: Any, options: Any) -> Connection:
        return sqlite3.connect(*places, **options, factory=Connection)

    store = SqlOffsets(url)
    with listening(sa.Engine, "do_connect", connect):
        for offsets in ({ZERO: at(1)}, {ZERO: at(2), PARTITIONS[1]: at(5)}):
            commit(store, "g", offsets)
            for partition, offset in offsets.items():
                assert load(store, "g", partition) == offset
    assert asked


class Failing(SqlOffsets):
    """A store whose first transactions fail."""

    def __init__(
        self, url: str, times: int, error: Exception | None = None, **options: Any
    ) -> None:
        super().__init__(url, **options)
        self.times = times
        self.error = error or OperationalError("", {}, Exception("deadlock found"))
        self.tries = 0
        self.before: Callable[[], object] = lambda: None

    def _upsert(self, *args: Any) -> None:
        self.before()
        self.tries += 1
        if self.tries <= self.times:
            raise self.error
        super()._upsert(*args)


@pytest.mark.parametrize(
    "kind",
    [IntegrityError, InterfaceError, InternalError, OperationalError, ProgrammingError],
)
def test_a_transaction_that_loses_goes_again_whatever_its_driver_calls_that(
    url: str, kind: type[DBAPIError]
) -> None:
    """A deadlock, a conflict, a row that is there now: of many, some lose often."""
    lost = kind("", {}, Exception("deadlock found"))
    store = Failing(url, TRANSACTION_TRIES - 1, lost, create=True)
    commit(store, "g", {ZERO: at(1)})
    assert load(SqlOffsets(url), "g", ZERO) == at(1)
    assert store.tries == TRANSACTION_TRIES


def test_a_database_that_goes_on_failing_is_an_error(url: str) -> None:
    store = Failing(url, 99, create=True)
    with pytest.raises(OffsetStoreError, match="deadlock found"):
        commit(store, "g", {ZERO: at(1)})
    assert store.tries == TRANSACTION_TRIES


def test_no_transaction_begins_behind_the_deadline(url: str) -> None:
    """Its caller has gone, and it would write an old offset."""
    clock = ManualClock(monotonic_s=CLOCK.monotonic_s())
    store = Failing(url, 2, create=True, clock=clock)
    store.before = lambda: clock.advance_s(60)
    with pytest.raises(OffsetStoreError, match="deadlock found"):
        commit(store, "g", {ZERO: at(2)})
    assert store.tries == 1


def test_whatever_a_driver_raises_is_an_error_of_the_store(url: str) -> None:
    """PyMySQL without its package for a server's kind of password, for one."""
    commit(SqlOffsets(url, create=True), "g", {ZERO: at(1)})

    def refuse(*_arguments: Any) -> None:
        raise RuntimeError("'cryptography' package is required")

    for call in (
        lambda: load(SqlOffsets(url), "g", ZERO),
        lambda: commit(SqlOffsets(url), "g", {ZERO: at(2)}),
    ):
        with (
            listening(sa.Engine, "do_connect", refuse),
            pytest.raises(OffsetStoreError, match="'cryptography' package"),
        ):
            call()


class AsyncDriver(SQLiteDialect_pysqlite):
    """A driver as SQLAlchemy has them for asyncio."""

    driver = "aio"
    is_async = True

    @classmethod
    def get_pool_class(cls, _url: sa.URL) -> type[sa.Pool]:
        return sa.AsyncAdaptedQueuePool


def test_a_driver_for_asyncio_is_refused() -> None:
    """Also for an `AsyncClient`: the store has a thread of its own."""
    sa.dialects.registry.register("sqlite.aio", __name__, AsyncDriver.__name__)
    with pytest.raises(ConfigError, match=r"a driver that blocks.*got aio"):
        SqlOffsets("sqlite+aio:///offsets.db")


def test_no_error_tells_the_options_of_a_driver() -> None:
    """They hold passwords as well."""
    store = SqlOffsets("sqlite:////no/such/directory/x.db?timeout=7.25")
    with pytest.raises(OffsetStoreError) as caught:
        load(store, "g", ZERO)
    assert "7.25" not in str(caught.value)


# -- a race ---------------------------------------------------------------------------


def write(url: str, gate: Any, rounds: int, sign: int) -> None:
    """Commit all partitions, again and again, with one's own number in every row."""
    store = SqlOffsets(url, create=True)
    for number in range(rounds):
        gate.wait(240)
        value = at(2 * number + sign, sign)
        commit(store, f"g{number}", dict.fromkeys(PARTITIONS, value))


@pytest.mark.slow
def test_of_two_writers_one_is_last_in_all_rows(url: str) -> None:
    """Each round both insert the same rows: neither fails, and nothing is mixed."""
    rounds = 12
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(2)
    # A wait for SQLite's lock ends after 5 s else.
    url += "?timeout=120"
    writers = [
        context.Process(target=write, args=(url, gate, rounds, sign)) for sign in (0, 1)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(240)
    assert [writer.exitcode for writer in writers] == [0, 0]
    for number in range(rounds):
        found = {load(SqlOffsets(url), f"g{number}", one) for one in PARTITIONS}
        assert len(found) == 1
        assert found <= {at(2 * number, 0), at(2 * number + 1, 1)}
