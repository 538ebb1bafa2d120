"""`metaq pipeline init`, `run`, `status`: what they do without Spark."""

import sys
from pathlib import Path

import pytest

from tests.cli.runner import run


@pytest.mark.slow
def test_a_project_has_the_parameters_of_the_command(tmp_path: Path) -> None:
    """Texts that mean something to YAML are kept as they are."""
    place = tmp_path / "größe" / "errors"
    words = ("--topic", "logs:#1", "--alerts", "alarms", "--zookeeper", "zk:2181/a")
    done = run("pipeline", "init", str(place), *words, "--timeout", "0.1")
    assert done.exit_code == 0
    assert "cannot find out which topics are missing: no ZooKeeper" in done.output
    found = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
    assert found == [
        "README.md",
        "spark-pipeline.yml",
        "transformations/counts.sql",
        "transformations/logs.py",
    ]
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((place / "spark-pipeline.yml").read_text())
    assert (spec["name"], spec["storage"]) == ("errors", f"file://{place}/storage")
    settings = spec["configuration"]
    assert {name: settings[name] for name in settings if name.startswith("metaq.")} == {
        "metaq.zookeeper": "zk:2181/a",
        "metaq.zkRoot": "/meta",
        "metaq.progressGroup": "errors",
        "metaq.sourceTopic": "logs:#1",
        "metaq.alertsTopic": "alarms",
        "metaq.deadLetterTopic": "logs:#1.dead",
        "metaq.delivery": "exactly-once",
    }


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    result = run("pipeline", "init", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path}: expected an empty directory or none" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_name_that_is_no_group_is_refused(tmp_path: Path) -> None:
    """The directory's name is that of the group, too."""
    result = run("pipeline", "init", str(tmp_path / "two words"))
    assert result.exit_code == 1
    assert "group 'two words': expected a name without ' '" in result.output
    result = run("pipeline", "init", str(tmp_path / "50% #1" / "errors"))
    assert result.exit_code == 1
    assert "another directory: expected a path without ' ' '#' '%'" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--topic", "a/b"), "expected names without blanks, commas and slashes"),
        (("--alerts", ""), "expected names without blanks, commas and slashes"),
        (
            ("--topic", "t", "--alerts", "t"),
            "expected another topic for alerts than that",
        ),
    ],
)
def test_topics_that_no_pipeline_can_have_are_refused(
    words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """Before anything is written; alerts among the lines would make alerts."""
    result = run("pipeline", "init", str(tmp_path / "new"), *words)
    assert result.exit_code == 1
    assert sentence in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("init", "x", "--broker", "b:1"), "a pipeline finds its brokers in ZooKeeper"),
        (("run", "."), None),
        (("run", "/nowhere"), "does not exist"),
        (
            ("run", ".", "--full-refresh", "a", "--full-refresh-all"),
            "--full-refresh and --full-refresh-all exclude",
        ),
        (("run", ".", "--every", "-1"), "--every"),
        (
            ("run", ".", "--master", "sc://host", "--conf", "a=b"),
            "--conf and --spark-log have no effect",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: tuple[str, ...], what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Spark starts; so is a PySpark without the extra."""
    monkeypatch.setitem(sys.modules, "grpc", None)  # it cannot be imported
    result = run("pipeline", *words)
    if what is None:
        assert result.exit_code == 1
        assert "pip install 'metaq[pipeline]'" in result.output
        return
    assert result.exit_code == 2
    assert what in result.output


@pytest.mark.parametrize(
    ("words", "installed", "sentence"),
    [
        (
            ("init", "new"),
            "4.1.4",
            "a new project requires PySpark 4.2 or newer, got 4.1.4",
        ),
        (
            ("run", "."),
            "4.0.5",
            "a declared pipeline requires PySpark 4.1 or newer, got 4.0.5",
        ),
    ],
)
def test_a_pyspark_that_is_too_old_is_named(
    words: tuple[str, ...],
    installed: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the one that it takes; before Spark starts and before a file is written."""
    packages = tmp_path / "packages" / f"pyspark-{installed}.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text(f"Name: pyspark\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(packages.parent)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = run("pipeline", *words)
    assert result.exit_code == 1
    assert sentence in result.output
    assert list(here.iterdir()) == []


@pytest.mark.spark
@pytest.mark.parametrize("words", [("run", "."), ("status", ".")])
def test_a_pyspark_without_the_functions_is_named(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not public, so the next PySpark may have others."""
    for name in ("yaml", "grpc"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "metaq.pipeline.declared.updates", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.pipelines.cli", None)
    result = run("pipeline", *words)
    assert result.exit_code == 1
    assert "requires PySpark 4.1 to 4.3" in result.output
    assert "run it with spark-pipelines" in result.output


@pytest.mark.spark
def test_a_java_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no token of ours, so others on the machine could run code in it."""
    for name in ("yaml", "grpc"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spark-pipeline.yml").write_text("name: a\nstorage: file:///a\n")
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    result = run("pipeline", "run", ".")
    assert result.exit_code == 1
    assert "run this command by itself, not by spark-submit" in result.output
