"""PySpark finds the formats: top-level modules of a certain name, in the wheel."""

import importlib
import tomllib

from metaq.spark.data_source import FORMATS
from tests.house.tree import ROOT


def test_every_format_has_a_module_that_pyspark_finds() -> None:
    """One module per format: PySpark takes one `DefaultSource` of each."""
    names = [path.stem for path in ROOT.glob("pyspark_*.py")]
    found = {importlib.import_module(name).DefaultSource for name in names}
    assert found == set(FORMATS)
    assert len(names) == len(FORMATS)


def test_those_modules_are_packed() -> None:
    """A wheel without them would need a registration by hand."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for path in ROOT.glob("pyspark_*.py"):
        assert wheel["force-include"][path.name] == path.name


def test_the_names_of_the_formats_are_those_of_the_manual() -> None:
    """Queries name them."""
    assert [source.name() for source in FORMATS] == [
        "metaq",
        "metaq-segments",
    ]
