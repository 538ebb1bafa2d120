"""Tables of cases that are one test: an id of its own costs more than such a case.

Each test is collected by every worker, and reported three times. Cases that need fresh
fixtures, or marks of their own, are a matter for `pytest.mark.parametrize`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with one case after the other; the one that fails is told.

    Args:
        names: arguments of a case, joined by ", ", as `parametrize` has them.
        cases: a value each, or a tuple of them where there are several names.
    """
    arguments = names.split(", ")
    table = list(cases)
    assert table, names

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [p for n, p in signature.parameters.items() if n not in arguments]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            for case in table:
                values = [case] if len(arguments) == 1 else case
                own = dict(zip(arguments, values, strict=True))
                try:
                    test(**own, **given)
                except Exception as error:
                    error.add_note(f"case: {own!r}")
                    raise

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
