"""Change a PostgreSQL table and publish a message: both, or neither.

    python examples/two_phase.py --database postgresql:///shop --zookeeper \
127.0.0.1:2181 pay order-17 250
    python examples/two_phase.py --database ... --zookeeper ... recover

A payment is one global transaction with a part in PostgreSQL (`psycopg`'s two-phase
commit, for which the server needs `max_prepared_transactions` above 0) and a part in
MetaQ. The row that the database's part inserts is the decision:

    1 begin          both parts
    2 change         the table
    3 publish        to the topic
    4 prepare mq     from here on the message survives crashes, and is not read
    5 prepare db     the same of the row
    6 commit db      the decision: with the row the message is to be read, else not
    7 commit mq

`recover` finishes what a crash left: what the database has prepared has no decision and
is rolled back; then each message that is prepared goes by its row. It runs before each
payment too, and one process does all of it: two would roll each other back.
`--crash-before STEP` kills the program there, to try.
"""

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Callable
from typing import Final

import psycopg

from metaq.client import Client, HeuristicError, MetaqError, Xa

QUALIFIER: Final = "two-phase-example"
"""Names this program to the brokers: the same after every restart."""
FORMAT_ID: Final = 4711
"""Names it to the database, whose list has the transactions of others too."""
STEPS: Final = (
    "begin", "change", "publish", "prepare-mq", "prepare-db", "commit-db", "commit-mq",
    "end",
)  # fmt: skip
TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS payments (id text PRIMARY KEY, cents bigint NOT NULL)"
)

Step = Callable[[str], None]
Connection = psycopg.Connection[tuple[object, ...]]


def pay(
    database: Connection, xa: Xa, topic: str, payment: str, cents: int, step: Step
) -> None:
    """Make one payment; when it raises, `recover` decides what becomes of it."""
    # What a crash left unprepared a broker keeps for a while: no attempt may meet it.
    attempt = uuid.uuid4().hex
    xid = xa.xid(FORMAT_ID, payment, attempt)
    step("begin")
    database.tpc_begin(database.xid(FORMAT_ID, payment, attempt))
    xa.begin(xid, timeout=30)
    step("change")
    database.execute("INSERT INTO payments VALUES (%s, %s)", (payment, cents))
    step("publish")
    xa.send(topic, b"%s %d" % (payment.encode(), cents), key=payment)
    step("prepare-mq")
    xa.prepare()
    step("prepare-db")
    database.tpc_prepare()
    step("commit-db")
    database.tpc_commit()
    step("commit-mq")
    xa.commit(xid)
    step("end")


def recover(database: Connection, xa: Xa) -> None:
    """Finish what is prepared; harmless when nothing is, and when it is interrupted."""
    for prepared in database.tpc_recover():
        if prepared.format_id == FORMAT_ID:
            database.tpc_rollback(prepared)
            print("rolled back in the database:", prepared.gtrid)
    for xid in xa.recover():
        payment = xid.global_id.decode()
        is_paid = has_row(database, payment)
        decide = xa.commit if is_paid else xa.rollback
        try:
            decide(xid)
        except HeuristicError as error:
            # An operator was faster; whether it was right is for people to judge.
            print("ended by an operator:", payment, error)
            xa.forget(xid)
        print("published:" if is_paid else "not published:", payment)


def has_row(database: Connection, payment: str) -> bool:
    """Return whether a payment is in the table."""
    text = "SELECT 1 FROM payments WHERE id = %s"
    found = database.execute(text, (payment,)).fetchone()
    database.commit()
    return found is not None


def crash_before(wanted: str | None) -> Step:
    """Return what kills this process when it comes to a step."""

    def step(name: str) -> None:
        if name == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def main(words: list[str]) -> int:
    """Run one command; 0 when it was done, 1 when the next `recover` has to end it."""
    parser = argparse.ArgumentParser(description="Pay and publish, or neither.")
    parser.add_argument("--database", required=True, help="as psycopg takes it")
    parser.add_argument("--zookeeper", required=True, help="host:port, of MetaQ")
    parser.add_argument("--topic", default="payments")
    parser.add_argument("--crash-before", choices=STEPS)
    commands = parser.add_subparsers(dest="command", required=True)
    paying = commands.add_parser("pay")
    paying.add_argument("payment")
    paying.add_argument("cents", type=int)
    commands.add_parser("recover")
    given = parser.parse_args(words)
    try:
        with (
            psycopg.connect(given.database) as database,
            Client(given.zookeeper) as client,
            client.xa(qualifier=QUALIFIER) as xa,
        ):
            database.execute(TABLE)
            database.commit()
            recover(database, xa)
            if given.command == "pay" and not has_row(database, given.payment):
                step = crash_before(given.crash_before)
                pay(database, xa, given.topic, given.payment, given.cents, step)
                print("paid:", given.payment)
    except (MetaqError, psycopg.Error) as error:
        print(f"not known to be done, run recover: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
