"""Writes docs/reference/: every public name, option and error, from the docstrings and tables that define them.

python -m tools.reference_docs            # writes them
python -m tools.reference_docs --check    # 1 where one is not what the code says
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import kgen
from kgen import errors, list_options
from kgen.commands.explain import Explanation
from kgen.option_list import Option
from kgen.report.graph_report import ExternReport, GraphReport, KernelReport, Refusal, StepReport
from kgen.verdict import Verdict

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
REPORTS = (Explanation, GraphReport, KernelReport, ExternReport, Refusal, StepReport, Verdict)
MADE = "`python -m tools.reference_docs` writes this page from the code. `tests/house/test_reference_docs.py` compares."


def public_names() -> list[str]:
    """The names of the package that users write, in order."""
    return sorted(name for name in dir(kgen) if name in kgen._PUBLIC)


# ---- names -------------------------------------------------------------------------------------------------------------


def api() -> str:
    parts = [f"# Public names\n\n{MADE}", *map(_entry, public_names())]
    parts += ["## What kgen.explain returns", *(_object(one.__name__, one, "###", "") for one in REPORTS)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> str:
    found = getattr(kgen, name)
    if isinstance(found, ModuleType):
        parts = [f"## kgen.{name}", _prose(found.__doc__)]
        members = [] if found is errors else _members(found)
        return "\n\n".join([*parts, *(_object(f"{name}.{one}", value, "###") for one, value in members)])
    return _object(name, found, "##")


def _members(module: ModuleType) -> list[tuple[str, object]]:
    """What a module offers: the names that it lists, else its own functions and classes."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [(name, getattr(module, name)) for name in listed]
    own = [(name, one) for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
    return [(name, one) for name, one in own if not name.startswith("_") and (inspect.isfunction(one) or inspect.isclass(one))]


def _object(name: str, found: object, level: str, package: str = "kgen.") -> str:
    parts = [f"{level} {package}{name}", *_signature(found), _prose(inspect.getdoc(found))]
    if inspect.isclass(found):
        parts += ["\n".join(_methods(found))]
    return "\n\n".join(filter(None, parts))


def _signature(found: object) -> Iterator[str]:
    if callable(found) and not inspect.isclass(found):
        yield f"    {getattr(found, '__name__', '')}{_parameters(found)}"


def _parameters(found: Callable[..., object]) -> str:
    """The signature without the package's own module paths, and without addresses of defaults."""
    text = str(inspect.signature(found))
    return re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "...", text)


def _methods(kind: type) -> Iterator[str]:
    """A line for each method and property of the class's own that has a docstring."""
    for name, value in vars(kind).items():
        doc = inspect.getdoc(value) if isinstance(value, property) or inspect.isfunction(value) else None
        if doc and not name.startswith("_"):
            arguments = "" if isinstance(value, property) else f"({', '.join(list(inspect.signature(value).parameters)[1:])})"
            yield f"- `{name}{arguments}`: {' '.join(_literals(doc).split())}"


def _prose(doc: str | None) -> str:
    return _literals(inspect.cleandoc(doc or "")).replace("<", "&lt;")


def _literals(doc: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", doc, flags=re.DOTALL)


# ---- options and errors ------------------------------------------------------------------------------------------------


def options() -> str:
    head = ["| option | default | values | variable | what it does |", "|---|---|---|---|---|"]
    text = "Give them as `options={...}`, in `kgen.config.override(...)`, or by the variable in the environment."
    return "\n".join(["# Options", "", MADE, "", text, "", *head, *map(_option, list_options())]) + "\n"


def _option(one: Option) -> str:
    values = ", ".join(f"`{value}`" for value in one.values) or f"`{one.type}`".replace("|", "or")
    variable = f"`{one.variable}`" if one.variable else ""
    return f"| `{one.name}` | `{one.default!r}` | {values} | {variable} | {one.text} |"


def error_classes() -> list[type[errors.KgenError]]:
    """Every error, in the order in which they are defined."""
    found = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.KgenError)]
    return [one for one in found if one.__module__ == errors.__name__]


def error_index() -> str:
    text = (
        "A `UserError` is something that you can change, an `InternalError` a bug in kgen. Words in braces stand for what the "
        "message says. torch may wrap an error of a back end in its own `BackendCompilerFailed`: see `inner_exception`."
    )
    return "\n\n".join(["# Errors", MADE, text, *map(_error, error_classes())]) + "\n"


def _error(kind: type[errors.KgenError]) -> str:
    base = kind.__base__
    parts = [f"## {kind.__name__}", _prose(vars(kind).get("__doc__"))]
    parts += [f"A `{base.__name__}`." if base is not None and base is not Exception else "The base of all errors."]
    parts += [f"    {kind.template}"]
    parts += [f"What to do: {_escaped(kind.hint)}."] if kind.hint else []
    return "\n\n".join(filter(None, parts))


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")


PAGES: dict[str, Callable[[], str]] = {"api.md": api, "options.md": options, "errors.md": error_index}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    old = [name for name, text in PAGES.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text()]
    if given.check:
        print(*(f"{name} is out of date" for name in old), sep="\n", end="\n" if old else "")
        return int(bool(old))
    FOLDER.mkdir(exist_ok=True)
    for name in old:
        (FOLDER / name).write_text(PAGES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
