"""Writes the script that repeats a fault: the part as code, its inputs beside it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch.fx import GraphModule

from kgen.bisection.copies import RandomState
from kgen.bisection.part import Part
from kgen.bisection.rerun import INPUTS
from kgen.capture.operators import source_line
from kgen.config import CODE_FIELDS, Config

__all__ = ["SCRIPT", "What", "Written", "options_of", "write_script"]

SCRIPT = "repro.py"


@dataclass(frozen=True, slots=True)
class Written:
    """Where the script is (None where the part cannot be written as code), and what it said when it was tried."""

    path: Path | None
    shows: bool
    text: str


@dataclass(frozen=True, slots=True)
class What:
    """What a script is about. `call` is the function of `kgen.bisection.rerun` that it calls. It imports the modules first:
    these have the user's templates and operators. A trial of it may take so many seconds."""

    title: str
    modules: Sequence[str] = ()
    call: str = "rerun"
    seconds: float = 600.0


def write_script(folder: Path, part: Part, config: Config, state: RandomState, what: What) -> Written:
    """Writes the script to a folder, which is made, and runs it once."""
    why_not = _unwritable(part.gm)
    if why_not:
        return Written(None, False, why_not)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"inputs": list(part.inputs), "constants": dict(_constants(part.gm)), "random": state.cpu}
    torch.save(kept, folder / INPUTS)
    path = folder / SCRIPT
    path.write_text(_text(part, config, what), encoding="utf-8")
    return _tried(path, what.seconds)


def _unwritable(gm: GraphModule) -> str:
    """Why the part has no text of its own; empty where it has."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"{node.target} has graphs of its own, which no script can hold"
        if node.op == "get_attr" and not isinstance(getattr(gm, str(node.target), None), torch.Tensor):
            return f"{node.target} is no tensor"
    unknown = [name for name, value in _names(gm) if not _import_line(name, value)]
    return f"{unknown[0]} cannot be imported" if unknown else ""


def _constants(gm: GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    for node in gm.graph.find_nodes(op="get_attr"):
        yield str(node.target), getattr(gm, str(node.target)).detach()


def _text(part: Part, config: Config, what: What) -> str:
    imports = [*(f"import {name}" for name in what.modules), *(_import_line(name, value) for name, value in _names(part.gm))]
    lines = [
        f'"""{what.title}', "", *_lines(part), "",
        f"Run this file: it compiles the part with kgen, on the inputs in {INPUTS}, and compares it with eager.", '"""', "",
        "import torch", "from torch import device, inf, nan", "",
        *imports, f"from kgen.bisection.rerun import {what.call}", "", "",
        "class Part(torch.nn.Module):", *_indented(part.gm.graph.python_code("self").src), "", "",
        'if __name__ == "__main__":', f"    {what.call}(Part(), __file__, {options_of(config)!r})",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# Names that every script imports, or that stand in annotations alone.
_KNOWN = frozenset({"torch", "device", "inf", "nan", "fx_pytree", "pytree", "NoneType"})


def _names(gm: GraphModule) -> list[tuple[str, object]]:
    """Further names that the code needs, with what they stand for."""
    return [(name, value) for name, value in gm.graph.python_code("self").globals.items() if name not in _KNOWN]


def _import_line(name: str, value: object) -> str:
    """Empty where no import gives the value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    return f"from {module} import {own} as {name}" if module and own.isidentifier() else ""


def _lines(part: Part) -> list[str]:
    """The user's lines, as text that ends no docstring."""
    found = dict.fromkeys(f"    {node.target}  {source_line(node)}".rstrip() for node in part.calls)
    return [line.replace("\\", "\\\\").replace('"""', "'''") for line in found]


def _indented(source: str) -> Iterator[str]:
    """The method, without the torch.fx annotations that need names of its own."""
    for line in source.strip("\n").splitlines():
        text = re.sub(r"\s*#.*$", "", line) if line.lstrip().startswith("#") else line
        if text.strip():
            yield f"    {text.strip()}" if text.lstrip().startswith("def ") else f"        {text.strip()}"


def options_of(config: Config) -> dict[str, object]:
    """The options that change code and are not the defaults."""
    default = Config()
    names = {field.name for field in dataclasses.fields(Config)} & set(CODE_FIELDS)
    found = {name: getattr(config, name) for name in sorted(names) if getattr(config, name) != getattr(default, name)}
    return {"cache": False, "strict": True, **{k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}}


def _tried(path: Path, seconds: float) -> Written:
    command = [sys.executable, path.name]
    folders = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": folders}
    try:
        ran = subprocess.run(
            command, cwd=path.parent, env=environment, timeout=seconds, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Written(path, True, f"it has not ended after {seconds:.0f} seconds")
    if ran.returncode < 0:
        return Written(path, True, f"it dies of {signal.Signals(-ran.returncode).name}")
    last = (ran.stdout.strip() or ran.stderr.strip()).splitlines()[-1:]
    return Written(path, ran.returncode != 0, last[0] if last else f"exit code {ran.returncode}")
