"""Stores offsets in MetaQ's database table, through SQLAlchemy (extra `sql`).

    topic  partition  group_id  offset  msg_id        one row per (topic, partition,
    test   0-1        group-1   4096    17            group_id), 0-1 = broker-partition

MetaQ inserts a row with the consumer's id instead of the group, so its own updates
never find it. Here a row is updated by group, and inserted if there is none.

Databases differ in how they compare names and count updated rows. A table created here
compares names byte by byte; one that treats `G` and `g` as equal is refused when a row
is read; and if an update counts no rows, a query checks whether the row exists.

A failed transaction is repeated as a whole, a bounded number of times: after a
deadlock, a conflict of serializable transactions, a row that another member inserted at
the same time, a lost connection. Drivers use different error classes for these, so all
errors of the database are handled alike. There is no savepoint, because a deadlock
rolls it back too.

Source: docs/metaq-1.4/client.md 13 and 21, row 6.
"""

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from threading import Event
from typing import Final, TypeVar

from metaq.client.errors import OffsetStoreError
from metaq.client.group.assignments import Fence
from metaq.client.off_loop import OffLoop
from metaq.client.offsets.offset_reset import NO_MESSAGE
from metaq.client.offsets.offset_store import Failures, Offsets
from metaq.clock import Clock, SystemClock
from metaq.errors import ConfigError, MetaqError
from metaq.model import MAX_OFFSET, GroupOffset, MessageId, Offset, TopicPartition
from metaq.retry import Backoff

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import mysql
    from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
except ModuleNotFoundError as missing:
    raise ConfigError(
        "offsets in a database need SQLAlchemy, which is not installed:"
        " pip install 'metaq[sql]'"
    ) from missing

TABLE: Final = "meta_topic_partition_group_offset"
NAME_CHARS_MAX: Final = 255
"""Length of the columns for names in a table created here, in characters."""
CLOSE_TIMEOUT_S: Final = 5.0
TRANSACTION_TRIES: Final = 10
"""Maximum number of attempts at a transaction; of members that commit at the same time,
at least one succeeds in each attempt."""
BACKOFF: Final = Backoff(first_s=0.005, max_s=0.1)

T = TypeVar("T")

_NAME: Final = (
    sa.String(NAME_CHARS_MAX)
    .with_variant(
        mysql.VARCHAR(NAME_CHARS_MAX, charset="utf8mb4", collation="utf8mb4_bin"),
        "mysql",
        "mariadb",
    )
    .with_variant(
        sa.Unicode(NAME_CHARS_MAX, collation="Latin1_General_100_BIN2"), "mssql"
    )
)


def offsets_table(name: str) -> sa.Table:
    """Return MetaQ's table, as it is created in a database without it."""
    return sa.Table(
        name,
        sa.MetaData(),
        sa.Column("topic", _NAME, primary_key=True),
        sa.Column("partition", _NAME, primary_key=True),
        sa.Column("group_id", _NAME, primary_key=True),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("msg_id", sa.BigInteger),
    )


class SqlOffsets:
    """An `OffsetStore` in a table of any database that SQLAlchemy supports.

    Durability: a commit is one transaction of the database, complete on return.
    Concurrency: one event loop at a time; several objects and processes may share the
    table. Uses one connection, opened when needed and reopened when lost.
    """

    def __init__(
        self,
        url: str,
        table: str = TABLE,
        *,
        create: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Name the table; nothing is connected before the first call.

        Args:
            url: SQLAlchemy's URL of the database, with one of its blocking drivers:
                `postgresql+psycopg://user@host/name`.
            table: name of the table.
            create: create the table if it does not exist.
            clock: clock of the deadlines, for tests.

        Raises:
            ConfigError: the URL is invalid, its driver is not installed, or is one for
                `asyncio`.
        """
        try:
            self._engine = sa.create_engine(url, pool_pre_ping=True)
        except (ArgumentError, ModuleNotFoundError) as error:
            # The URL is not in the text, because it may contain a password.
            raise ConfigError(f"offsets in a database: {error}") from error
        if self._engine.dialect.is_async:
            raise ConfigError(
                "offsets in a database: expected a driver that blocks, which gets a"
                f" thread of its own, got {self._engine.driver}"
            )
        # Without the options of the driver, which may contain passwords and keys.
        place = self._engine.url.set(query={})
        self._name = f"offsets in {place.render_as_string()}, table {table}"
        self._table = offsets_table(table)
        self._is_creation_due = create
        self._clock = clock or SystemClock()
        self._off_loop = OffLoop(self._name, clock=self._clock)

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None if there is none.

        Raises:
            OffsetStoreError: the database refused, or its value is not an offset.
            RequestTimeoutError: the database does not answer.
        """
        work = partial(self._load, group, partition, deadline_s)
        return await self._off_loop.run(work, deadline_s=deadline_s)

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store all of them or none, in one transaction.

        Raises:
            OffsetStoreError, RequestTimeoutError: as for `load`.

        Cancellation: the offsets may still be stored.
        """
        del fence  # a database does not know the owners of partitions
        if offsets:
            work = partial(self._commit, group, dict(offsets), deadline_s)
            await self._off_loop.run(work, deadline_s=deadline_s)
        return {}

    async def close(self) -> None:
        """Close the connection; the next call opens another one."""
        deadline_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
        try:
            await self._off_loop.run(self._engine.dispose, deadline_s=deadline_s)
        except (MetaqError, SQLAlchemyError):
            # A hung connection ends with its thread.
            return
        finally:
            self._off_loop.close()

    # -- on the thread ----------------------------------------------------------------

    def _load(
        self, group: str, partition: TopicPartition, deadline_s: float
    ) -> GroupOffset | None:
        key = _key(group, partition)
        query = self._table.select().filter_by(**key)
        row = self._transact(lambda link: link.execute(query).first(), deadline_s)
        if row is None:
            return None
        *found, offset, message_id = row
        wanted = list(key.values())
        if found != wanted:
            raise OffsetStoreError(
                f"{self._name}: expected the row of {wanted}, got that of {found}: the"
                " names need a collation that keeps them apart"
            )
        # Tables created by others may have decimal columns.
        if not isinstance(offset, int | Decimal) or not 0 <= offset <= MAX_OFFSET:
            raise OffsetStoreError(
                f"{self._name}: group {group}, {partition}: expected an offset from 0"
                f" to {MAX_OFFSET}, got {offset!r}"
            )
        return GroupOffset(
            Offset(int(offset)),
            NO_MESSAGE if message_id is None else MessageId(int(message_id)),
        )

    def _commit(self, group: str, offsets: Offsets, deadline_s: float) -> None:
        def store(connection: sa.Connection) -> None:
            # Sorted, so that all members lock rows in the same order.
            for partition in sorted(offsets):
                self._upsert(connection, _key(group, partition), offsets[partition])

        self._transact(store, deadline_s)

    def _transact(self, work: Callable[[sa.Connection], T], deadline_s: float) -> T:
        tries = 0
        while True:
            tries += 1
            try:
                self._create_if_due()
                with self._engine.begin() as connection:
                    return work(connection)
            except Exception as error:  # drivers raise more than SQLAlchemy's
                pause_s = BACKOFF.delay_s(tries)
                if (
                    not isinstance(error, DBAPIError)
                    or tries == TRANSACTION_TRIES
                    or self._clock.monotonic_s() + pause_s >= deadline_s
                ):
                    raise self._failure(error) from error
            Event().wait(pause_s)

    def _upsert(
        self, connection: sa.Connection, key: Mapping[str, str], offset: GroupOffset
    ) -> None:
        message_id = NO_MESSAGE if offset.message_id is None else offset.message_id
        values = {"offset": offset.offset, "msg_id": message_id}
        update = self._table.update().filter_by(**key).values(values)

        # Some databases count only changed rows, some do not count at all.
        if connection.execute(update).rowcount > 0:
            return
        question = self._table.select().filter_by(**key)
        if connection.execute(question).first() is not None:
            # The row existed, or was inserted in between.
            connection.execute(update)
            return
        connection.execute(self._table.insert().values({**key, **values}))

    def _create_if_due(self) -> None:
        if not self._is_creation_due:
            return
        try:
            self._table.create(self._engine, checkfirst=True)
        except SQLAlchemyError:
            # Another process may have created the table at the same time.
            if not sa.inspect(self._engine).has_table(self._table.name):
                raise
        self._is_creation_due = False

    def _failure(self, error: Exception) -> OffsetStoreError:
        if isinstance(error, SQLAlchemyError):
            cause = str(error).splitlines()[0]
        else:
            cause = repr(error)
        return OffsetStoreError(f"{self._name}: {cause}")


def _key(group: str, partition: TopicPartition) -> dict[str, str]:
    """Return the key columns of a row, in the order of the table."""
    return {"topic": partition.topic, "partition": partition.name, "group_id": group}
