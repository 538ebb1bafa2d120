"""Tables of cases that are one test: an id of its own costs more than such a case.

Each test is collected by every worker, and reported three times. Cases that need fresh
fixtures, or marks of their own, are a matter for `pytest.mark.parametrize`.
"""

import functools
import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test with each case, in an order of the seed, and report all failures.

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
        takes_seed = "seed" in signature.parameters
        if not takes_seed:
            kind = inspect.Parameter.KEYWORD_ONLY
            fixtures.append(inspect.Parameter("seed", kind))

        @functools.wraps(test)
        def run(**given: Any) -> None:
            shuffled = random.Random(given["seed"]).sample(table, len(table))
            if not takes_seed:
                del given["seed"]
            failures: list[Exception] = []
            for case in shuffled:
                values = [case] if len(arguments) == 1 else case
                own = dict(zip(arguments, values, strict=True))
                try:
                    test(**own, **given)
                except Exception as error:
                    error.add_note(f"case: {own!r}")
                    failures.append(error)
            if len(failures) > 1:
                message = f"{len(failures)} of {len(table)} cases failed"
                raise ExceptionGroup(message, failures)
            if failures:
                raise failures[0]

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
