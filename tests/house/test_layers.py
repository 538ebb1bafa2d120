"""The import law: who may import whom.

  STOP before you edit the table below. A new arrow is a design decision: it
  decides what can be tested alone and what breaks together. Most wishes for a new
  arrow are wishes for a value type in `model`, or a Protocol beside its consumer.

7   cli ─────────────┐       pipeline          testing (imported by tests)
                     │          │
6                    │        spark
                     │          │
5        broker      │       client            siblings: never import each other
           │  └──────┴───┬──────┘
       replication       │                     on storage, peer, zk: copies of a broker
           │  └────────┐ │
           │            peer                   on net: the way to another broker
           │             │
4   storage   txn queues net delay  zk         siblings: never import each other
       │       │    │     │          │
3   record, filter ─── fs   protocol   assignment    config  lifecycle  retry   routing
       │            │     │          │         loop_thread   prometheus   dial
       │            │     │          │             │        │         │
2      └────────────┴─ errors ── stats ── deadlines ┴────────┴─────────┘
1                 model ── cluster_snapshot   clock
"""

import ast
import sys

import pytest

from tests.house.tree import PROJECT, Import, Tree

L1 = {"model", "clock"}
L2 = L1 | {"errors", "stats", "deadlines"}
PURE = {"model", "errors"}
L4 = {"storage", "txn", "queues", "delay", "net", "zk"}

ALLOWED: dict[str, set[str]] = {
    "": set(),  # metaq/__init__.py imports nothing
    "__main__": {"cli"},
    "model": set(),
    "cluster_snapshot": {"model"},
    "clock": {"model"},
    "errors": {"model"},
    "stats": L1,
    "deadlines": set(),
    "dial": set(),
    "config": L2,
    "retry": L2,
    "prometheus": L2,
    "lifecycle": L2,
    "loop_thread": L2,
    "fs": L2 | {"fs"},
    "record": PURE | {"record"},
    "filter": PURE | {"record", "filter"},
    "protocol": PURE | {"protocol"},
    "assignment": PURE,
    "routing": PURE | {"routing"},
    "storage": L2 | {"record", "fs", "config", "lifecycle", "retry", "storage"},
    "txn": L2 | {"record", "fs", "config", "lifecycle", "retry", "txn"},
    "delay": PURE | {"record", "fs", "delay"},
    "queues": PURE | {"deadlines", "protocol", "queues"},
    "net": L2 | {"lifecycle", "protocol", "net"},
    "zk": L2
    | {"cluster_snapshot", "config", "dial", "retry", "lifecycle", "fs"}
    | {"filter", "routing", "zk"},
    "peer": L2 | {"dial", "retry", "protocol", "net", "peer"},
    "replication": L2
    | {"record", "protocol", "fs", "config", "lifecycle", "retry"}
    | {"storage", "zk", "peer", "replication"},
    "broker": L2
    | L4
    | {"record", "protocol", "fs", "config", "lifecycle", "retry", "prometheus"}
    | {"filter", "peer", "replication", "routing", "broker"},
    "client": L2
    | {"record", "protocol", "assignment", "fs", "config", "lifecycle", "retry"}
    | {"net", "zk", "prometheus", "loop_thread", "peer", "cluster_snapshot"}
    | {"filter", "routing", "client"},
    # storage and fs: `metaq-segments` is there to read segments without a broker.
    # The sink has senders of its own: clock and snapshot are what these hand on.
    "spark": PURE
    | {"clock", "cluster_snapshot"}
    | {"loop_thread", "peer", "client", "config", "record", "storage", "fs"}
    | {"filter", "spark"},
    # What a declared pipeline counts is exported as all counters are. Of `spark` and
    # `client` it imports what users do: USED_BY_PIPELINE.
    "pipeline": PURE | {"stats", "prometheus", "fs", "client", "spark", "pipeline"},
    "cli": {"*"},
    "testing": {"*"},
}
FORBIDDEN_TARGETS = {"testing"}  # nothing inside metaq may import it
TESTING_MAY_NOT = {"cli", "pipeline", "spark"}
# What users of the connector and of the client import, and `pipeline` with them.
USED_BY_PIPELINE = {
    "client",
    "client.names",
    "spark",
    "spark.columns",
    "spark.errors",
    "spark.letters",
    "spark.offsets",
    "spark.options",
    "spark.schema",
    "spark.segments.checks",
    "spark.topics",
    "spark.values",
}
# The command line does with the client what users can: it has no door of its own.
USED_BY_CLI = {"client", "client.metrics"}
USED_BY = {
    ("pipeline", "client"): USED_BY_PIPELINE,
    ("pipeline", "spark"): USED_BY_PIPELINE,
    ("cli", "client"): USED_BY_CLI,
}
OPTIONAL = {"pipeline", "spark"}
ROOT_READERS = {"cli.main", "protocol.version"}  # of metaq.__version__

# Inside a package: room -> the other rooms of it that the room may import. Every room
# may import the modules of SHARED, which import each other alone. The other modules of
# the package's root are its "top".
ROOMS: dict[str, dict[str, set[str]]] = {
    "client": {
        "cluster": set(),
        "produce": {"cluster"},
        "group": {"cluster"},
        "offsets": {"cluster", "group"},
        "decisions": {"cluster", "group", "offsets", "produce"},
        "consume": {"cluster", "group", "offsets", "produce", "decisions"},
        "admin": {"cluster", "offsets", "consume", "decisions"},
        "top": {"cluster", "group", "offsets", "consume", "produce", "admin"},
        "sync": {"cluster", "offsets", "consume", "produce", "admin", "top"},
    },
    "spark": {
        "sink": set(),
        "source": {"sink"},
        "segments": set(),
        "top": {"sink", "source", "segments"},
    },
    "pipeline": {"decode": set(), "jobs": set(), "declared": {"jobs"}, "top": set()},
}
SHARED: dict[str, set[str]] = {
    "client": {
        "duplicate_ids", "errors", "fan_out", "foreign_names", "names", "off_loop",
        "options", "own_process", "partitioner", "spool", "timeouts", "validation",
    },
    "spark": {
        "cluster", "clusters", "columns", "errors", "leaders", "letters", "offsets",
        "option_table", "options", "plan", "record_bounds", "routing", "rows",
        "schema", "values", "versions",
    },
    "pipeline": {"errors", "installed"},
}  # fmt: skip

PURE_PACKAGES = {"record", "filter", "protocol", "assignment", "routing"}
PURE_MODULES = {
    "zk.paths", "zk.znodes", "zk.plan", "storage.retention",
    "client.partitioner", "spark.plan", "spark.offsets", "txn.state", "txn.recovery",
    "txn.records", "txn.sums", "txn.ports",
    "client.consume.cursor", "client.consume.decode", "peer.gap_search", "peer.replies",
    "replication.epochs", "replication.record", "replication.progress",
    "replication.election", "replication.joins", "replication.replica",
    "replication.json_values",
}  # fmt: skip
NETWORK = {"socket", "ssl", "selectors", "select", "socketserver", "http", "urllib"}
IMPURE_STDLIB = NETWORK | {
    "asyncio", "concurrent", "fcntl", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "queue", "random", "secrets", "shutil", "signal", "subprocess",
    "tempfile", "threading", "time", "uuid",
}  # fmt: skip
PURE_STDLIB = {"urllib.parse"}
NO_NETWORK = {"storage", "txn"}
# Messages go to brokers and come from them; a client may do without ZooKeeper.
NO_ZOOKEEPER = ("client.produce.", "client.consume.")

THIRD_PARTY: dict[str, set[str]] = {
    "configobj": {"config"},
    "kazoo": {"zk._connection", "zk.coordinator", "zk.servers"},
    "lark": {"filter.grammar"},
    "apscheduler": {"broker.schedule"},
    "click": {"cli"},
    "rich": {"cli"},
    "prometheus_client": {"prometheus", "broker.http", "client.metrics"},
    "aiohttp": {"broker.http"},
    "ifaddr": {"net.own_host"},
    "zlib_ng": {"record.checksum"},
    "pyspark": {"spark", "pipeline"},
    "py4j": {"pipeline.jobs.session"},
    "pyarrow": {"spark", "pipeline"},
    "deltalake": {
        "pipeline.jobs.archive_store",
        "pipeline.jobs.day_files",
        "pipeline.jobs.latest",
    },
    "fastavro": {"pipeline.decode.avro_values"},
    "sqlalchemy": {"client.sql_offsets"},
    "pytest": {"testing.pytest_plugin"},
}

# (module, imported): a lazy import inside a function, and why it is one.
LAZY: dict[tuple[str, str], str] = {
    ("client", "client.public"): "a module of the package is had without the rest",
    ("broker.app", "broker.http"): "the HTTP port is off by default; aiohttp is 15 MiB",
    ("broker.app", "broker.replica_part"): "most brokers are no replica; it is large",
    ("filter.language", "filter.grammar"): "most clients, and tasks, have no filter",
    ("net.own_host", "ifaddr"): "10 ms, and a machine with a route does without",
    **dict.fromkeys(
        [
            ("spark.data_source", "spark.schema"),
            ("spark.data_source", "spark.source.batch"),
            ("spark.data_source", "spark.source.stream"),
            ("spark.data_source", "spark.sink.writer"),
            ("spark.data_source", "spark.segments.segment_reader"),
        ],
        "Spark starts a process for each question, and forks one for each task",
    ),
    ("spark.clusters", "spark.cluster"): "tasks ask no cluster, as a rule",
    ("spark.sink.exact_sink", "spark.sink.exactly_once"): "the driver alone decides",
    ("spark.source.read_task", "spark.source.dead_letters"): "few values are bad",
    ("spark.topics", "spark.source.stream"): "tasks plan no stream",
    ("pipeline.declared", "pipeline.declared.updates"): "asks whether it can be had",
    ("spark", "spark.data_source"): "the package takes no Spark, this function does",
    ("pipeline.decode", "pipeline.decode.avro_values"): "fastavro is optional",
    ("pipeline.jobs.day_files", "deltalake"): "tasks need it for remote stores alone",
    ("zk.embedded", "pyspark"): "find_spec only; the wheel carries ZooKeeper's jars",
}


def layer_faults(tree: Tree) -> list[str]:
    faults = []
    for name in tree.modules:
        package = name.split(".")[0]
        allowed = ALLOWED.get(package)
        if allowed is None:
            faults.append(f"{name}: no row in the table for '{package}'")
            continue
        for item in tree.imports(name):
            if item.target.startswith("."):
                faults.append(f"{name}: relative imports hide the layer")
            elif name == "":
                faults.append(f"the root imports {item.target}; it imports nothing")
            elif item.own == "" and name not in ROOT_READERS:
                faults.append(f"{name} imports the root")
            elif item.own and not may_import(package, allowed, item.head):
                faults.append(f"{name} may not import {item.own}")
            elif package == "cli" and item.head in OPTIONAL and not item.is_lazy:
                faults.append(f"{name} imports {item.head}, which is optional, on top")
            elif item.own not in USED_BY.get((package, item.head), {item.own}):
                faults.append(f"{name}: users of {item.head} import no {item.own}")
    return faults


def may_import(package: str, allowed: set[str], head: str) -> bool:
    if package == "testing":
        return head not in TESTING_MAY_NOT
    if head in FORBIDDEN_TARGETS:
        return False
    return "*" in allowed or head in allowed or head == package


def room_faults(tree: Tree) -> list[str]:
    faults = []
    for name in tree.modules:
        package = name.split(".")[0]
        if package not in ROOMS or name in (package, f"{package}.public"):
            continue  # what a package exports may come from everywhere in it
        room = room_of(name)
        for item in tree.imports(name):
            if item.own is None or item.head != package:
                continue
            other = room_of(item.own)
            allowed = {room, "shared"} if room != "shared" else {"shared"}
            if other not in allowed | ROOMS[package].get(room, set()):
                faults.append(f"{name} in room '{room}' may not import {item.own}")
    return faults


def room_of(name: str) -> str:
    """Return the room of a module; "top" or "shared" of those at a package's root."""
    package, _, rest = name.partition(".")
    first = rest.split(".")[0]
    if first in ROOMS[package]:
        return first
    return "shared" if first in SHARED[package] else "top"


def foreign_faults(tree: Tree) -> list[str]:
    faults = []
    for name in tree.modules:
        for item in tree.imports(name):
            head = item.head
            if item.own is not None or head in sys.stdlib_module_names or not head:
                continue
            rooms = THIRD_PARTY.get(head, set())
            fits = any(name == room or name.startswith(f"{room}.") for room in rooms)
            if not fits and not (item.is_lazy and (name, head) in LAZY):
                faults.append(f"{name} imports {head}")
    return faults


def purity_faults(tree: Tree) -> list[str]:
    faults = []
    for name in tree.modules:
        is_module = name in PURE_MODULES
        if not is_module and name.split(".")[0] not in PURE_PACKAGES:
            continue
        for item in tree.imports(name):
            is_impure = item.head in IMPURE_STDLIB and item.target not in PURE_STDLIB
            if item.own is None and is_impure:
                faults.append(f"{name} is pure and imports {item.target}")
            if is_module and item.own and not is_pure_neighbour(name, item):
                faults.append(f"{name} is pure and imports {item.own}")
    return faults


def is_pure_neighbour(name: str, item: Import) -> bool:
    """A pure module inside an impure package may lean on pure code alone."""
    errors = f"{name.split('.', maxsplit=1)[0]}.errors"
    return (
        item.head in PURE | PURE_PACKAGES
        or item.own in PURE_MODULES
        or item.own == errors
    )


def network_faults(tree: Tree) -> list[str]:
    return [
        f"{name} imports {item.target}"
        for name in tree.modules
        if name.split(".")[0] in NO_NETWORK
        for item in tree.imports(name)
        if item.own is None and item.head in NETWORK
    ]


def zookeeper_faults(tree: Tree) -> list[str]:
    return [
        f"{name} imports {item.target}"
        for name in tree.modules
        if name.startswith(NO_ZOOKEEPER)
        for item in tree.imports(name)
        if item.own is not None and item.head == "zk"
    ]


def lazy_faults(tree: Tree) -> list[str]:
    faults = []
    for name, path in tree.modules.items():
        for item in tree.imports(name):
            key = item.head if item.own is None else item.own
            listed = (name, key) in LAZY or name.split(".")[0] == "cli"
            if item.is_lazy and not listed:
                faults.append(f"{name} imports {item.target} inside a function")
        for node in tree.nodes(path):
            if isinstance(node, ast.Name) and node.id == "__import__":
                faults.append(f"{name} imports by __import__")
            if isinstance(node, ast.Attribute) and node.attr == "import_module":
                faults.append(f"{name} imports by import_module")
            if isinstance(node, ast.alias) and node.name == "import_module":
                faults.append(f"{name} imports by import_module")
    return faults


def cycle_faults(tree: Tree) -> list[str]:
    graph = {
        name: {
            item.own
            for item in tree.imports(name)
            if item.own and item.own in tree.modules
        }
        for name in tree.modules
    }
    done: set[str] = set()
    faults = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            faults.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return faults


def dead_row_faults(tree: Tree) -> list[str]:
    rooms = {
        f"{package}.{name}"
        for package in ROOMS
        for name in (ROOMS[package].keys() - {"top"}) | SHARED[package]
    }
    rows = {*ALLOWED, *ROOT_READERS, *PURE_PACKAGES, *PURE_MODULES, *NO_NETWORK}
    rows |= rooms | USED_BY_PIPELINE | USED_BY_CLI
    rows.update(*THIRD_PARTY.values(), (importer for importer, _ in LAZY))
    return [
        f"{name} is in a table, and no module"
        for name in sorted(rows)
        if name not in tree.modules
    ]


@pytest.mark.slow
def test_imports_obey_the_table() -> None:
    """Every import of our own code is an arrow of the table."""
    assert layer_faults(PROJECT) == []


@pytest.mark.slow
def test_rooms_of_a_package_have_a_direction() -> None:
    """Inside a package imports go from room to room as the table says."""
    assert room_faults(PROJECT) == []


@pytest.mark.slow
def test_third_party_imports_stay_in_their_room() -> None:
    """Each foreign library is seen by the modules named for it and no other."""
    assert foreign_faults(PROJECT) == []


@pytest.mark.slow
def test_pure_code_has_no_hands() -> None:
    """Pure modules import neither clock, disk, network, threads nor logging."""
    assert purity_faults(PROJECT) == []


@pytest.mark.slow
def test_storage_and_transactions_know_no_network() -> None:
    """Packages that keep bytes on disk never open a socket."""
    assert network_faults(PROJECT) == []


@pytest.mark.slow
def test_producers_and_consumers_know_no_zookeeper() -> None:
    """Rooms of the client that move messages import nothing of the room `zk`."""
    assert zookeeper_faults(PROJECT) == []


@pytest.mark.slow
def test_imports_inside_functions_are_listed() -> None:
    """A lazy import is an exception with a reason, kept in the list above."""
    assert lazy_faults(PROJECT) == []


def test_tables_name_modules() -> None:
    """A row goes when its module does."""
    assert dead_row_faults(PROJECT) == []


@pytest.mark.slow
def test_there_is_no_import_cycle() -> None:
    """Imports form a graph without cycles, those inside functions with them."""
    assert cycle_faults(PROJECT) == []
