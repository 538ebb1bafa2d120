"""The table of options, and the texts that its rows read."""

import re

from metaq.spark.option_table import OPTIONS, Kind, Use, read_options


def test_the_table_keeps_its_own_law() -> None:
    """Names once, sentences whole, defaults legal, choices where they are needed."""
    names = [spec.name.lower() for spec in OPTIONS]
    assert len(set(names)) == len(names)
    for spec in OPTIONS:
        assert re.fullmatch(r"[A-Z].*\.", spec.meaning), spec.name
        assert spec.uses, spec.name
        assert spec.default is None or spec.read(spec.default) is not None
        assert bool(spec.choices) == (spec.kind in {Kind.CHOICE, Kind.OFFSETS})
    for use in Use:
        named = {spec.name for spec in OPTIONS if use in spec.uses}
        assert read_options({}, use).keys() == named
