"""Offsets in a database: MetaQ's table, through SQLAlchemy (extra `sql`).

    topic  partition  group_id  offset  msg_id        one row per (topic, partition,
    test   0-1        group-1   4096    17            group_id), 0-1 = broker-partition

MetaQ inserts a row under the consumer's id in place of the group, so its own updates
never find it. Here a row is updated by group, and inserted when there is none.

Databases differ in what they take for equal, in what they count, and in whom they let
wait: a table that is made here compares names byte by byte, one that takes `G` for `g`
is refused when a row is read, and a count of updated rows is checked by a question when
it says none.

A transaction that fails is made again as a whole, a bounded number of times: after a
deadlock, a conflict of serializable transactions, a row that another member inserted
in between, a lost connection. Which class of error means which differs between the
drivers, so all are alike; and there is no savepoint, for a deadlock takes those with
it.

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
"""Length of the columns of names in a table that is made here."""
CLOSE_TIMEOUT_S: Final = 5.0
TRANSACTION_TRIES: Final = 10
"""Attempts at a transaction before its error is raised; of members that commit at once,
each time one at least gets through."""
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
    """Return MetaQ's table, as it is made in any database that has none."""
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
    """An `OffsetStore` in a table of any database that SQLAlchemy knows.

    Durable: a commit is one transaction of the database, over when it returns.
    Concurrency: one event loop at a time; several objects and processes may share the
    table. One connection, made when it is needed, and made again when it was lost.
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
            table: its name.
            create: make the table when it is not there.
            clock: gives meaning to deadlines, for tests.

        Raises:
            ConfigError: the URL is none, its driver is not installed, or is one for
                `asyncio`.
        """
        try:
            self._engine = sa.create_engine(url, pool_pre_ping=True)
        except (ArgumentError, ModuleNotFoundError) as error:
            # What was given is not repeated: it may hold a password.
            raise ConfigError(f"offsets in a database: {error}") from error
        if self._engine.dialect.is_async:
            raise ConfigError(
                "offsets in a database: expected a driver that blocks, which gets a"
                f" thread of its own, got {self._engine.driver}"
            )
        # Options of drivers hold passwords and keys, too.
        place = self._engine.url.set(query={})
        self._name = f"offsets in {place.render_as_string()}, table {table}"
        self._table = offsets_table(table)
        self._is_creation_due = create
        self._clock = clock or SystemClock()
        self._off_loop = OffLoop(self._name, clock=self._clock)

    async def load(
        self, group: str, partition: TopicPartition, *, deadline_s: float
    ) -> GroupOffset | None:
        """Return the committed offset; None when there is none.

        Raises:
            OffsetStoreError: the database refused, or its value is no offset.
            RequestTimeoutError: it does not answer.
        """
        work = partial(self._load, group, partition, deadline_s)
        return await self._off_loop.run(work, deadline_s=deadline_s)

    async def commit(
        self, group: str, offsets: Offsets, *, fence: Fence | None, deadline_s: float
    ) -> Failures:
        """Store all of them or none, in one transaction.

        Raises:
            OffsetStoreError, RequestTimeoutError: as for `load`.

        Cancellation: what was sent may still be stored.
        """
        del fence  # a database knows nothing of owners
        if offsets:
            work = partial(self._commit, group, dict(offsets), deadline_s)
            await self._off_loop.run(work, deadline_s=deadline_s)
        return {}

    async def close(self) -> None:
        """Give the connection back; the next call makes another one."""
        deadline_s = self._clock.monotonic_s() + CLOSE_TIMEOUT_S
        try:
            await self._off_loop.run(self._engine.dispose, deadline_s=deadline_s)
        except (MetaqError, SQLAlchemyError):
            # Whatever is left of a connection that hangs goes with its thread.
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
        # Tables that others made may have columns of decimals.
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
            # In one order everywhere: rows that two members lock never cross.
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

        # Some count only what became different, some do not count at all.
        if connection.execute(update).rowcount > 0:
            return
        question = self._table.select().filter_by(**key)
        if connection.execute(question).first() is not None:
            # It was there, or came in between.
            connection.execute(update)
            return
        connection.execute(self._table.insert().values({**key, **values}))

    def _create_if_due(self) -> None:
        if not self._is_creation_due:
            return
        try:
            self._table.create(self._engine, checkfirst=True)
        except SQLAlchemyError:
            # Two that look at once both find no table, and one is late.
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
    """Return the columns that name a row, in the order of the table."""
    return {"topic": partition.topic, "partition": partition.name, "group_id": group}
