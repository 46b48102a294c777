"""Renders Jinja templates: one environment, undefined names are errors, no logic beyond `if`, `for` and macros."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2


@cache
def environment(folder: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(folder: Path, name: str, **values: Any) -> str:
    """The text of template `name` in `folder`; blank lines that slots left behind are dropped."""
    text = environment(folder).get_template(name).render(**values)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def template_sources(folder: Path) -> dict[str, str]:
    """Every template's text, for cache keys."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.jinja"))}
