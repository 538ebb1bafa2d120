"""docs/reference.md, made from the names of `metaq.client`: fields, texts, options."""

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from metaq import client
from metaq.client import public
from metaq.client.consume.redelivery import Reject
from metaq.client.errors import PartlySentError, XaError, XaRolledBackError
from metaq.client.metrics import METRICS
from metaq.errors import MetaqError, RequestTimeoutError, TransactionError
from tests.docs import metric_table
from tests.docs.option_tables import ROOT, TITLES, tables

PAGE = ROOT / "docs" / "reference.md"
PACKAGE = "metaq."
HEAD = """# Reference of `metaq.client`

Every name that `metaq.client` exports, every option, every field of its results and
statistics, every error and metric. [client.md](client.md) explains how they are used.
This page is made from the code by `python -m tests.docs.reference`.

"""
CALLS = (
    "Client",
    "Producer",
    "OrderedProducer",
    "Transaction",
    "Xa",
    "Consumer",
    "Queue",
    "Admin",
)
"""Each has a twin `Async...` with the same calls, which are awaited."""
OPTIONS_MIN = 10
"""Calls with as many arguments by name take the options below."""
# What to do, where it is more than the policy of the class says.
ADVICE = {
    "BufferFullError": "Wait for results, or raise `buffer_bytes_max`.",
    "ClosedError": "Do not use it after `close`.",
    "ConfigError": "Correct the setting that it names.",
    "CoordinationError": "Repeat the call; check whether ZooKeeper answers.",
    "CorruptRecordError": "Restore the data, or `seek` to `next_good_offset`.",
    "GroupInUseError": "Stop the group's consumers first.",
    "HandlerFailedError": "Correct the handler; the message is delivered again.",
    "HeuristicError": "Compare `code` with the other branches; then `forget`.",
    "LostBranchError": "Find out what the broker has lost, and create it by hand.",
    "MessageTooLargeError": "Send less, or raise the broker's bound.",
    "NoBrokerError": "Repeat the call; check whether the named broker is up.",
    "NoTopicError": "Create the topic, or correct its name.",
    "TransactionError": "Roll back, and repeat the transaction: read the text.",
    "OutcomeUnknownError": "Look for it; if sent again, it may be stored twice.",
    "OwnershipLostError": "Nothing: the next owner reads on from the committed offset.",
    "PartitionsAwayError": "Wait for the broker, or read without its `partitions`.",
    "PartlySentError": "Read `outcomes`, and repeat those that failed.",
    "Reject": "Raise it in a handler: the message is rejected at once.",
    "RequestTimeoutError": "Repeat it; of a change, first check if it was made.",
    "TopicExistsError": "Alter the topic, or use another name.",
    "TransactionInDoubtError": "Local: look for the messages. XA: repeat the decision.",
    "TransactionRolledBackError": "Repeat the transaction.",
    "UnknownXidError": "It has ended: see the log of the transaction manager.",
}


def page() -> str:
    """Return the whole page."""
    names = [name for name in client.__all__ if not _is_error(name)]
    twins = {f"Async{name}" for name in CALLS}
    plain = [name for name in names if name not in CALLS and name not in twins]
    parts = [HEAD, "## Calls\n\n", *map(_calls, CALLS), _options(), "## Values\n\n"]
    parts += [_value(name, getattr(public, name)) for name in plain]
    parts += ["## Parts of statistics\n\n"]
    parts += [_value(kind.__name__, kind) for kind in _parts(plain)]
    metrics = "\n## Metrics\n\n" + metric_table.table(METRICS)
    return "".join([*parts, _errors(), metrics])


def _is_error(name: str) -> bool:
    kind = getattr(public, name)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _sentence(text: str | None) -> str:
    """Return the first paragraph as one line that fits a table."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def _calls(name: str) -> str:
    kind, twin = getattr(public, name), getattr(public, f"Async{name}")
    rows = "".join(
        f"| `{member}{_arguments(found)}` |"
        f" {_sentence(inspect.getdoc(getattr(twin, member, found)))} |\n"
        for member, found in _members(kind)
    )
    title = f"### `{name}`, `Async{name}`\n\n{_sentence(twin.__doc__)}\n\n"
    return f"{title}| call | does |\n|---|---|\n{rows}\n"


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for name, found in inspect.getmembers_static(kind):
        is_call = inspect.isfunction(found) or isinstance(found, property)
        if not name.startswith("_") and is_call:
            yield name, found


def _arguments(found: object) -> str:
    if isinstance(found, property):
        return ""
    assert callable(found)
    parameters = list(inspect.signature(found).parameters.values())[1:]
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    if len(named) >= OPTIONS_MIN:
        kind = inspect.Parameter.VAR_KEYWORD
        parameters = [p for p in parameters if p not in named]
        parameters.append(inspect.Parameter("options", kind))
    words: list[str] = []
    for each in parameters:
        is_named = each.kind is each.KEYWORD_ONLY
        if is_named and "*" not in words and not any(w[0] == "*" for w in words):
            words.append("*")
        default = "" if each.default is each.empty else f"={_default(each.default)}"
        stars = "**" if each.kind is each.VAR_KEYWORD else ""
        words.append(f"{stars}{each.name}{default}")
    return f"({', '.join(words)})"


def _default(value: object) -> str:
    if isinstance(value, Mapping):
        return repr(dict(value))
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def _options() -> str:
    head = "| option | default | meaning |\n|---|---|---|\n"
    sections = [
        f"### {TITLES[name]}\n\n{head}{rows}\n\n" for name, rows in tables().items()
    ]
    return "".join(["## Options\n\n", *sections])


def _value(name: str, kind: typing.Any) -> str:
    title = f"### `{name}`\n\n"
    if name in TITLES:
        anchor = re.sub(r"[^\w -]", "", TITLES[name]).lower().replace(" ", "-")
        text = f"{_sentence(kind.__doc__)} Its fields are [above](#{anchor})."
        return f"{title}{text}\n\n"
    if not isinstance(kind, type):
        return f"{title}{_text_of_constant(name, kind)}\n\n"
    text = title + _sentence(kind.__doc__) + "\n\n"
    if issubclass(kind, enum.Enum):
        values = ", ".join(f"`{one.name}`" for one in kind)
        return f"{text}One of {values}.\n\n"
    rows = "".join(_fields(kind))
    if rows:
        text += f"| field | type | meaning |\n|---|---|---|\n{rows}\n"
    calls = "".join(
        f"| `{member}{_arguments(found)}` | {_sentence(inspect.getdoc(found))} |\n"
        for member, found in _members(kind)
    )
    return text + (
        f"| call or property | does |\n|---|---|\n{calls}\n" if calls else ""
    )


def _text_of_constant(name: str, kind: typing.Any) -> str:
    """Return the text under an alias, a new type or a function of that name."""
    if inspect.isfunction(kind):
        return f"`{name}{inspect.signature(kind)}`: {_sentence(kind.__doc__)}"
    for module in _modules():
        body = ast.parse(Path(module).read_text()).body
        for node, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(
                text.value, ast.Constant
            )
            target = ast.unparse(node).partition("=")[0].partition(":")[0].strip()
            if target == name and is_text:
                return _sentence(ast.literal_eval(typing.cast("ast.Expr", text).value))
    raise AssertionError(name)


def _modules() -> list[str]:
    """Return the files from which the package's public names come."""
    tree = ast.parse(Path(str(public.__file__)).read_text())
    names = [n.module for n in tree.body if isinstance(n, ast.ImportFrom) and n.module]
    return [str(sys.modules[name].__file__) for name in names if name in sys.modules]


def _fields(kind: type) -> Iterator[str]:
    """Yield a row for each field, of base classes first."""
    if not (dataclasses.is_dataclass(kind) or issubclass(kind, tuple)):
        return
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith(PACKAGE):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = typing.cast("ast.ClassDef", tree.body[0]).body
        for node, text in zip(body, [*body[1:], ast.Pass()], strict=True):
            if not isinstance(node, ast.AnnAssign) or _is_private(node):
                continue
            if ast.unparse(node.target) in getattr(kind, "_fields", base.__dict__):
                yield _row(node, text)


def _is_private(node: ast.AnnAssign) -> bool:
    return ast.unparse(node.target).startswith("_") or "ClassVar" in ast.unparse(
        node.annotation
    )


def _row(node: ast.AnnAssign, text: ast.stmt) -> str:
    meaning = ""
    if isinstance(node.value, ast.Call):  # of `metaq.stats`: name, sentence
        texts = [ast.literal_eval(a) for a in _constants(node.value)]
        meaning = texts[1] if len(texts) > 1 else ""
    if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
        meaning = f"{meaning} {ast.literal_eval(text.value)}".strip()
    kind = ast.unparse(node.annotation).replace("|", "\\|")
    return f"| `{ast.unparse(node.target)}` | `{kind}` | {_sentence(meaning)} |\n"


def _constants(call: ast.Call) -> list[ast.expr]:
    nested = [a for a in call.args if isinstance(a, ast.Call)]
    if nested:  # a MetricSpec
        return [a for a in nested[0].args if isinstance(a, ast.Constant)]
    return [a for a in call.args if isinstance(a, ast.Constant)]


def _parts(names: list[str]) -> list[type]:
    """Return the classes of fields that are not exported, by name."""
    todo = [getattr(public, name) for name in names]
    found: dict[str, type] = {}
    while todo:
        kind = todo.pop()
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            continue
        for hint in typing.get_type_hints(kind).values():
            for each in _classes_in(hint):
                is_ours = each.__module__.startswith(PACKAGE)
                if is_ours and each.__name__ not in {*found, *client.__all__}:
                    found[each.__name__] = each
                    todo.append(each)
    shown = (dataclasses.is_dataclass, lambda k: issubclass(k, enum.Enum | tuple))
    kinds = [kind for _, kind in sorted(found.items())]
    return [kind for kind in kinds if any(check(kind) for check in shown)]


def _classes_in(hint: typing.Any) -> Iterator[type]:
    if typing.get_args(hint):
        for each in typing.get_args(hint):
            yield from _classes_in(each)
    elif isinstance(hint, type):
        yield hint


def _errors() -> str:
    kinds = {getattr(public, n) for n in client.__all__ if _is_error(n)}
    head = (
        "## Errors\n\n"
        "What a program does something about. A kind is indented below the one that\n"
        "it also is. Any other error of this package is a kind of one of these, or of\n"
        "`MetaqError` alone; its class is in `metaq.client.errors` or `metaq.errors`,\n"
        "and its text says what to do. An argument of another type is a `TypeError`.\n"
        "*Stored* is about the messages of a call of a producer: *not stored* is\n"
        "certain, *in doubt* may be either. *Retriable*, the attribute `retriable`:\n"
        "the same call may succeed later, with nothing changed.\n\n"
        "| error | stored | retriable | meaning | what to do |\n"
        "|---|---|---|---|---|\n"
    )
    return head + "".join(_branch(kinds, None, 0))


def _branch(kinds: set[type], parent: type | None, depth: int) -> Iterator[str]:
    """Yield the rows of the kinds of one class, and below each those of its own."""
    for kind in sorted(kinds, key=lambda k: k.__name__):
        bases = [base for base in kind.__mro__[1:] if base in kinds]
        if (bases[0] if bases else None) is parent:
            yield _error_row(kind, depth)
            yield from _branch(kinds, kind, depth + 1)


def _error_row(kind: type, depth: int) -> str:
    retriable = "yes" if getattr(kind, "retriable", False) else "no"
    name = "&nbsp;&nbsp;" * depth + f"`{kind.__name__}`"
    meaning = _sentence(kind.__doc__)
    return f"| {name} | {_stored(kind)} | {retriable} | {meaning} | {advice(kind)} |\n"


def _stored(kind: type) -> str:
    if issubclass(kind, RequestTimeoutError):
        return "in doubt"
    if issubclass(kind, PartlySentError):
        return "see `outcomes`"
    if issubclass(kind, XaError) and not issubclass(kind, XaRolledBackError):
        return "see `code`"
    is_root = kind in {MetaqError, TransactionError, Reject}
    return "-" if is_root else "not stored"


def advice(kind: type) -> str:
    """Return what to do: of the class or its nearest base, else by its policy."""
    for each in kind.__mro__:
        if each.__name__ in ADVICE:
            return ADVICE[each.__name__]
        if "retriable" in vars(each) and each.retriable:  # type: ignore[attr-defined]  # seen
            break
    return "Repeat it." if getattr(kind, "retriable", False) else "Read its text."


def write() -> None:
    """Write the page: `python -m tests.docs.reference`."""
    PAGE.write_text(page().rstrip() + "\n")


if __name__ == "__main__":
    write()
