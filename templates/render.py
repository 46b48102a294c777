"""Renders Jinja templates: one environment, undefined names are errors, no logic beyond `if`, `for` and macros."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension


@cache
def environment(folder: Path, *extensions: type[Extension]) -> jinja2.Environment:
    """Kept, with the templates that it has compiled; one whose file has changed since is read again."""
    return jinja2.Environment(
        extensions=extensions,
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(folder: Path, name: str, **values: Any) -> str:
    """The text of template `name` in `folder`; blank lines that slots left behind are dropped."""
    return tidy(environment(folder).get_template(name).render(**values))


def tidy(text: str) -> str:
    """Without blank lines and trailing blanks."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def clean(name: str) -> str:
    """A buffer's or a size's name as an identifier."""
    return "".join(c if c.isalnum() else "_" for c in name)


def template_sources(folder: Path) -> dict[str, str]:
    """Every template's text, for cache keys."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.jinja"))}
