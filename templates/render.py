"""Renders Jinja templates: one environment, undefined names are errors, no logic beyond `if`, `for` and macros."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jinja2
from jinja2.ext import Extension

from kgen.ir import nodes as ir


class IndentedSlots(Extension):
    """A line that holds one ``{{ ... }}`` and nothing else indents every line of its text alike."""

    _line = re.compile(r"^([ \t]+)\{\{-?(.*?)-?\}\}[ \t]*$", re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return self._line.sub(lambda m: f"{m[1]}{{{{ ({m[2].strip()}) | indent({len(m[1])}) }}}}", source)


@cache
def environment(folders: Path | tuple[Path, ...], *extensions: type[Extension]) -> jinja2.Environment:
    """Kept, with the templates that it has compiled; one whose file has changed since is read again. Of several folders the
    first one that has a file counts."""
    return jinja2.Environment(
        extensions=extensions,
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def tidy(text: str) -> str:
    """Without blank lines and trailing blanks."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def clean(name: str) -> str:
    """A buffer's or a size's name as an identifier."""
    return "".join(c if c.isalnum() else "_" for c in name)


def source_lines(origins: Iterable[ir.Origin]) -> list[str]:
    """Comments of a kernel: the operators, then the user's lines. In C++ a backslash at the end would continue a comment."""
    origins = tuple(origins)
    names = dict.fromkeys(op for o in origins for op in o.operators)
    lines = [", ".join(names), *list(dict.fromkeys(o.line for o in origins if o.line))[:8]]
    return [line.replace("\n", " ").replace("\\", "/") for line in lines]


def template_sources(folder: Path) -> dict[str, str]:
    """Every template's text, for cache keys."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.jinja"))}
