"""`metaq-segments` in a real Spark session: found by name, parallel, filtered."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from metaq.spark import register
from metaq.spark.columns import ROW_SCHEMA
from metaq.spark.versions import HAS_FILTERS
from metaq.storage.segment import META_SUFFIX
from tests.spark.segment_dirs import (
    ARCHIVE,
    TIME_MS,
    ZIP,
    archive,
    flip,
    id_at,
    payloads,
    write_java_log,
    write_log,
)

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MANY = 200_000
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def load(spark: SparkSession, *paths: Path, **options: object) -> DataFrame:
    reader = spark.read.format("metaq-segments").options(**options)
    return reader.load([str(path) for path in paths])


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Let Spark hand filters to Python sources."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


def test_the_format_is_found_by_its_name(spark: SparkSession, data_dir: Path) -> None:
    """Without registration; the schema is that of the rows, in their order."""
    write_log(data_dir, payloads(3))
    found = load(spark, data_dir)
    assert found.columns == ROW_SCHEMA.names
    assert found.toArrow().schema.equals(ROW_SCHEMA)
    assert [row.value for row in found.collect()] == payloads(3)


def test_two_hundred_thousand_rows_come_once_each(
    spark: SparkSession, data_dir: Path
) -> None:
    """Count, sum and distinct offsets agree, over plain, archived and zipped files."""
    values = [b"%08d" % number * 2 for number in range(MANY)]
    directory = write_log(data_dir, values, segment_bytes=1 << 20, group=500)
    kinds = archive(directory, ZIP, ARCHIVE)
    assert len(kinds) > 5
    found = load(spark, data_dir, maxBytesPerPartition=300_000)
    assert found.rdd.getNumPartitions() > len(kinds)
    number = sf.substring(sf.col("value").cast("string"), 1, 8).cast("long")
    (row,) = found.agg(
        sf.count("*"), sf.sum(number), sf.count_distinct("offset")
    ).collect()
    assert tuple(row) == (MANY, MANY * (MANY - 1) // 2, MANY)


def test_an_empty_directory_is_an_empty_frame(
    spark: SparkSession, data_dir: Path
) -> None:
    """There is a schema, and no rows."""
    assert load(spark, data_dir).count() == 0


def test_the_directory_of_a_java_broker_has_null_times(
    spark: SparkSession, data_dir: Path
) -> None:
    """Rows of such segments come without an index, split by headers."""
    write_java_log(data_dir, [payloads(50), payloads(20)])
    found = load(spark, data_dir, maxBytesPerPartition=400)
    assert found.count() == 70
    assert found.where("timestamp is null and broker_id = -1").count() == 70


def test_damage_fails_or_is_left_out(spark: SparkSession, data_dir: Path) -> None:
    """The choice of the user reaches the tasks."""
    directory = write_log(data_dir, payloads(50))
    path = min(p for p in directory.iterdir() if p.name.endswith(META_SUFFIX))
    flip(path, 30)
    with pytest.raises(PySparkException, match="damaged record") as caught:
        load(spark, data_dir).count()
    assert f"file={path} offset=0 next_good_offset=60" in str(caught.value)
    assert load(spark, data_dir, onCorrupt="skip").count() == 49


def test_values_are_read_as_fields_of_json(spark: SparkSession, data_dir: Path) -> None:
    """The same formats as with a broker; bad values go to columns of their own."""
    write_log(data_dir, [b'{"level": "INFO", "code": 7}', b"none"])
    found = load(
        spark,
        data_dir,
        valueFormat="json",
        valueSchema="level STRING, code INT",
        badRows="column",
    )
    rows = found.select("value.level", "value.code", "bad_value").collect()
    assert [tuple(row) for row in rows] == [("INFO", 7, None), (None, None, b"none")]
    with pytest.raises(PySparkException, match="deadLetterTopic"):
        load(spark, data_dir, valueFormat="string", badRows="topic")


def test_a_wrong_option_is_one_sentence(spark: SparkSession, data_dir: Path) -> None:
    """It fails where the query is planned, and names the option."""
    with pytest.raises(PySparkException, match="onCorrupt"):
        load(spark, data_dir, onCorrupt="maybe").count()
    with pytest.raises(PySparkException, match="expected a file or directory"):
        load(spark, data_dir / "missing").count()


@pytest.mark.usefixtures("pushdown")
@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("topic = 'test' and partition = 0", 60),
        ("topic in ('test', 'none')", 60),
        ("topic = 'none'", 0),
        ("offset >= 600 and offset < 1200", 10),
        ("offset = 660", 1),
        (
            "timestamp >= timestamp_millis({0}) and timestamp < timestamp_millis({1})",
            30,
        ),
        ("timestamp > timestamp_millis({1})", 0),
        ("broker_id = 7 or value is null", 60),
        ("offset <> 60 and value is not null", 59),
    ],
)
def test_filters_give_the_same_rows_pushed_or_not(
    spark: SparkSession, data_dir: Path, condition: str, count: int
) -> None:
    """Push-down only saves work."""
    write_log(data_dir, payloads(30), first_id=id_at(TIME_MS - 5000))
    write_log(data_dir, payloads(30), first_id=id_at(TIME_MS))
    condition = condition.format(TIME_MS, TIME_MS + 1000)
    for pushed in ("true", "false"):
        found = load(spark, data_dir, filterPushdown=pushed)
        assert found.where(condition).count() == count


@pytest.mark.skipif(not HAS_FILTERS, reason="Spark hands over filters from 4.1 on")
@pytest.mark.usefixtures("pushdown")
def test_a_pushed_filter_leaves_files_unread(
    spark: SparkSession, data_dir: Path
) -> None:
    """Damage in a file that cannot match is never seen."""
    directory = write_log(data_dir, payloads(60))
    flip(min(p for p in directory.iterdir() if p.name.endswith(META_SUFFIX)), 30)
    found = load(spark, data_dir, filterPushdown="true")
    assert found.where("offset >= 1800").count() == 30


def test_registration_by_hand_may_be_repeated(
    spark: SparkSession, data_dir: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The same class under the same name: queries go on."""
    write_log(data_dir, payloads(3))
    for _ in range(2):
        register(spark)
    assert load(spark, data_dir).count() == 3
