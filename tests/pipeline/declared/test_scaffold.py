"""A new project: what is written, and what is refused before anything is."""

from pathlib import Path

import pytest

from metaq.errors import ConfigError
from metaq.pipeline.declared.scaffold import create_project

FILES = {
    "README.md",
    "spark-pipeline.yml",
    "transformations/counts.sql",
    "transformations/logs.py",
}


def create(directory: Path, source: str = "logs", alerts: str = "alerts") -> None:
    create_project(
        directory, zookeeper="zk:2181", root="/meta", source=source, alerts=alerts
    )


def test_a_project_is_files_that_compile(tmp_path: Path) -> None:
    """Its dead letters go where those of consumers do."""
    place = tmp_path / "errors"
    create(place)
    found = {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()}
    assert found == FILES
    compile((place / "transformations/logs.py").read_text(), "logs.py", "exec")
    spec = (place / "spark-pipeline.yml").read_text()
    assert '"logs.dead"' in spec
    assert "zk:2181" in spec


@pytest.mark.parametrize(
    ("name", "topics", "sentence"),
    [
        ("two words", ("a", "b"), "a name without"),
        ("x%/errors", ("a", "b"), "expected a path without '%'"),
        ("x", ("a", "a"), "expected another topic for alerts"),
        ("x", ("a/b", "c"), "expected names without"),
    ],
)
def test_a_wrong_name_is_refused(
    name: str, topics: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        create(tmp_path / name, *topics)
    assert not list(tmp_path.iterdir())


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="expected an empty directory or none"):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
