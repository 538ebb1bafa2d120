"""Checks of the installation: what is missing is named, with a command for it."""

import sys
from pathlib import Path

import pytest

from metaq.errors import ConfigError
from metaq.pipeline.installed import INSTALL, require_spark, require_version


def install(packages: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the metadata of a PySpark that is not there."""
    info = packages / f"pyspark-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: pyspark\nVersion: {version}\n")
    monkeypatch.syspath_prepend(packages)


def test_without_spark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_spark()
    monkeypatch.setitem(sys.modules, "pyspark", None)  # it cannot be imported
    with pytest.raises(ConfigError, match=r"metaq\[pipeline\]"):
        require_spark()


def test_an_older_pyspark_is_refused_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "4.1.4", monkeypatch)
    require_version((4, 1), "this")
    with pytest.raises(ConfigError) as caught:
        require_version((4, 2), "this")
    text = f"this requires PySpark 4.2 or newer, got 4.1.4: {INSTALL}"
    assert str(caught.value) == text
