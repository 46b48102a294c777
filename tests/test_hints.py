"""What messages tell people to do can be done: commands parse, options are taken, names and documents are there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kgen
from kgen import config, errors
from kgen.cli import parse
from kgen.verdict import CHANGES

pytestmark = pytest.mark.none
ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"`(?:python -m )?kgen ([^`]*)`")
OPTIONS = re.compile(r"options=(\{[^{}]*\})")
VARIABLE = re.compile(r"\bKGEN_[A-Z_]+\b")
DOCUMENT = re.compile(r"\bdocs/[\w/]+\.md\b")
NAME = re.compile(r"\bkgen\.\w+(?:\.\w+)*\b")
INSTALL = re.compile(r"`python -m pip install ([^`]*)`")


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """A string as people see it, with a word in place of each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "WORD" for part in node.values)


def strings() -> Iterator[tuple[str, str]]:
    """Every string of kgen that is more than a word and no docstring, with where it stands."""
    for folder in ("kgen", "lowering", "scheduler", "templates"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if id(node) in documents:
                    continue
                if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                    text = text_of(node).replace("{{", "{").replace("}}", "}")
                    if " " in text:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


STRINGS = list(strings())


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    return [(place, match[match.lastindex or 0]) for place, text in STRINGS for match in pattern.finditer(text)]


def filled(text: str) -> str:
    """A template's text with a word for each detail."""
    return re.sub(r"\{\w+(![rs])?\}|<\w+>", "WORD", text)


def hints() -> Iterator[tuple[str, str]]:
    kinds = [errors.KgenError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        yield kind.__name__, kind.hint
    yield from ((reason.name, text) for reason, text in CHANGES.items())


def test_commands_in_messages_parse() -> None:
    commands = found(COMMAND)
    assert len(commands) >= 3
    for place, command in commands:
        try:
            parse(shlex.split(filled(command).replace("...", "")))
        except SystemExit:
            pytest.fail(f"{place}: `kgen {command}` is no command")


def test_options_in_messages_are_taken() -> None:
    options = found(OPTIONS)
    assert len(options) >= 8
    for place, text in options:
        given = ast.literal_eval(filled(text))
        assert config.from_call(options=given), place


def test_variables_in_hints_are_read() -> None:
    named = {(kind, variable) for kind, text in hints() for variable in VARIABLE.findall(text)}
    assert len(named) >= 5
    assert [one for one in named if one[1] not in config.VARIABLES] == []


def test_documents_in_messages_exist() -> None:
    documents = found(DOCUMENT)
    assert documents
    assert [one for one in documents if not (ROOT / one[1]).is_file()] == []


def resolves(name: str) -> bool:
    module = kgen
    for part in name.split(".")[1:]:
        try:
            module = getattr(module, part)
        except AttributeError:
            try:
                module = importlib.import_module(f"{module.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
    return True


def test_names_in_hints_are_there() -> None:
    named = {name for _, text in hints() for name in NAME.findall(text)}
    assert len(named) >= 2
    assert [name for name in named if not resolves(name)] == []
    assert "name" in inspect.signature(kgen.template).parameters  # the hint of DuplicateTemplate
    assert "replaces" in inspect.signature(kgen.loops).parameters  # of LoopsTaken
    assert {"problems", "only"} <= inspect.signature(kgen.testing.check_template).parameters.keys()  # of TemplateCheckFailed


def test_what_is_to_be_installed_is_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = found(INSTALL)
    assert installs
    for place, text in installs:
        extra = re.search(r"'torch-kgen\[(\w+)\]'", text)
        assert "-e ." in text or (extra and extra[1] in project["optional-dependencies"]), place


@pytest.mark.parametrize("text", ["`kgen cash list`", "`python -m kgen cache merge`"])
def test_a_wrong_command_is_seen(text: str) -> None:
    match = COMMAND.search(text)
    assert match
    with pytest.raises(SystemExit):
        parse(shlex.split(match[1]))
