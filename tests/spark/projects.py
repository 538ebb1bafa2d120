"""Projects of declared pipelines, for tests that run them."""

from pathlib import Path

SPEC = """
name: {name}
storage: {storage}
libraries:
  - glob:
      include: transformations/**
"""


def write_project(place: Path, name: str, tables: str) -> None:
    """Write a project whose one file declares the tables."""
    (place / "transformations").mkdir(parents=True)
    (place / "transformations" / "tables.py").write_text(tables)
    spec = SPEC.format(name=name, storage=(place / "storage").as_uri())
    (place / "spark-pipeline.yml").write_text(spec)
