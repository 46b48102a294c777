"""Renders Jinja templates: one environment, undefined names are errors, no logic beyond `if`, `for` and macros."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension

from kgen.ir import nodes as ir

if TYPE_CHECKING:
    from kgen.ir.plan import Config
    from kgen.templates.loop_slots import Slots

_WORD = re.compile(r"[A-Za-z_]\w*")

# Where the built-in Jinja files of a device lie, which other ones may import and include.
BUILT_IN = {"cuda": Path(__file__).parent / "triton" / "kernels", "cpu": Path(__file__).parent / "cpp" / "kernels"}


class IndentedSlots(Extension):
    """A line that holds one ``{{ ... }}`` and nothing else indents every line of its text in the same way."""

    _line = re.compile(r"^([ \t]+)\{\{-?(.*?)-?\}\}[ \t]*$", re.MULTILINE)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return self._line.sub(lambda m: f"{m[1]}{{{{ ({m[2].strip()}) | indent({len(m[1])}) }}}}", source)


# Behind a line of a Jinja file: its name and number. Text that is rendered carries it along.
_MARK = re.compile("\x01([^\x01\x02]*):(\\d+)\x02")
_TAG = re.compile(r"\{\{|\}\}|\{%|%\}|\{#|#\}")


# A line of a text that says of which file, and which of its lines, the next one is.
PLACE = re.compile(r'^# (\d+) "(.+)"( slot)?$', re.MULTILINE)


class LineMarks(Extension):
    """Marks the lines of a Jinja file that become lines of text: those that end outside of tags, and keep their line break."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        made, inside = [], ""
        for number, whole in enumerate(source.splitlines(keepends=True), 1):
            line = whole.rstrip("\n")
            for tag in _TAG.findall(line):
                if not inside and tag[0] == "{":
                    inside = tag
                elif inside and tag == {"{{": "}}", "{%": "%}", "{#": "#}"}[inside]:
                    inside = ""
            kept = not inside and line.strip() and not line.rstrip().endswith(("%}", "#}", "-}}", "\\"))
            made.append(f"{line}\x01{name}:{number}\x02{whole[len(line) :]}" if kept else whole)
        return "".join(made)


def with_line_marks(text: str, folders: Sequence[Path], language: str) -> str:
    """A marked text with lines such as ``# 12 "matmul.cpp.jinja"``, as a C preprocessor writes them: the lines that follow are
    the template's. g++ and debuggers read them, to Python they are comments. There ``# 12 "matmul.py.jinja" slot`` says that
    all lines up to the next such comment are those of a slot in line 12."""
    lines, made = text.split("\n"), list[str]()
    lines_of, coming = _marked(lines), _Coming(("", 0))
    for line, place, following in zip(lines, lines_of, [*lines_of[1:], None], strict=True):
        repeats = language != "cpp" and place == following
        if place is not None and not coming.fits(place, repeats) and _may_stand_behind(made, language):
            made.append(f'# {place[1]} "{_file(place[0], folders)}"{" slot" if repeats else ""}')
            coming = _Coming(place, repeats)
        made.append(_MARK.sub("", line))
        coming = _Coming(("", 0)) if "\0" in line else coming.behind_a_line()
    return "\n".join(made)


Place = tuple[str, int]  # a Jinja file and a line of it


@dataclass(frozen=True, slots=True)
class _Coming:
    """Where the next line is by what stands before it. It `repeats` where a slot has several lines of text."""

    place: Place
    repeats: bool = False

    def fits(self, place: Place, repeats: bool) -> bool:
        return place == self.place and self.repeats >= repeats

    def behind_a_line(self) -> _Coming:
        return self if self.repeats else _Coming((self.place[0], self.place[1] + 1))


def _marked(lines: Sequence[str]) -> list[Place | None]:
    """Of each line its place in a template: its own mark, or the next one, for a slot's lines have theirs behind the last."""
    found: list[Place | None] = []
    following = None
    for line in reversed(lines):
        mark = _MARK.search(line)
        following = (mark[1], int(mark[2])) if mark else following
        found.append(following)
    return found[::-1]


def _may_stand_behind(made: Sequence[str], language: str) -> bool:
    """Whether a line of its own may stand here: in C++ not within a statement, for that may be an argument of a macro."""
    last = made[-1].rstrip() if made else ""
    ends = not last or last.endswith((";", "{", "}", "\0")) or last.lstrip().startswith(("//", "# "))
    return not last.endswith("\\") and (language != "cpp" or ends)


def _file(name: str, folders: Sequence[Path]) -> Path:
    return next((folder / name for folder in folders if (folder / name).is_file()), Path(name))


def is_marked(folder: Path) -> bool:
    """Whether kernels name the lines of a folder's Jinja files: they do unless these are kgen's own."""
    return folder not in BUILT_IN.values()


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


def lines(items: Sequence[str]) -> str:
    """Lines as the text of a slot."""
    return "\n".join(items)


def tidy(text: str) -> str:
    """Without blank lines and trailing blanks."""
    return "\n".join(line.rstrip() for line in text.splitlines() if _MARK.sub("", line).strip()) + "\n"


def clean(name: str) -> str:
    """A buffer's or a size's name as an identifier."""
    return "".join(c if c.isalnum() else "_" for c in name)


def canonical_text(text: str, names: frozenset[str]) -> str:
    """The text with comments dropped and made-up names replaced by their order of appearance."""
    order: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        word = match.group()
        return order.setdefault(word, f"n{len(order)}") if word in names else word

    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("//", "# ")))
    return _WORD.sub(rename, body)


def source_lines(origins: Iterable[ir.Origin]) -> list[str]:
    """Comments of a kernel: the operators, the modules that call them, the user's lines, and what its parameters are in these
    modules. In C++ a backslash at the end would continue a comment."""
    origins = tuple(origins)
    names = dict.fromkeys(op for o in origins for op in o.operators)
    modules = dict.fromkeys(path for o in origins for path in o.modules)
    inside = [f"in {', '.join(modules)}"] if modules else []
    parameters = dict.fromkeys(f"{name}: {path}" for o in origins for name, path in o.parameters)
    lines = [", ".join(names), *inside, *list(dict.fromkeys(o.line for o in origins if o.line))[:8], *list(parameters)[:16]]
    return [line.replace("\n", " ").replace("\\", "/") for line in lines]


def template_sources(folder: Path) -> dict[str, str]:
    """Every template's text, for cache keys."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.jinja"))}


# ---- loop kernels ----------------------------------------------------------------------------------------------------------


def _environment(path: Path, device: str) -> jinja2.Environment:
    return of_slots(_folders(path, device), is_marked(path.parent))


def of_slots(folders: tuple[Path, ...], marked: bool) -> jinja2.Environment:
    """The environment of templates with slots, whose text has marks where that is wanted."""
    return environment(folders, IndentedSlots, LineMarks) if marked else environment(folders, IndentedSlots)


def _folders(path: Path, device: str) -> tuple[Path, ...]:
    beside = BUILT_IN[device]
    return (path.parent,) if path.parent == beside else (path.parent, beside)


def sources(path: Path, device: str) -> dict[str, str]:
    """The texts of a Jinja file and of those that it includes and imports, by name. Raises jinja2's errors."""
    loaded = _environment(path, device)
    found, waiting = dict[str, str](), [path.name]
    while waiting:
        name = waiting.pop()
        assert loaded.loader is not None
        found[name] = loaded.loader.get_source(loaded, name)[0]
        others = jinja2.meta.find_referenced_templates(loaded.parse(found[name], name))
        waiting += [other for other in others if other is not None and other not in found]
    return found


def undeclared(path: Path, device: str) -> set[str]:
    """The names that a Jinja file and those that it includes use without defining them. An imported file has macros, which get
    arguments. Raises jinja2's errors."""
    found, waiting, done = set[str](), [path.name], set[str]()
    loaded = _environment(path, device)
    while waiting:
        name = waiting.pop()
        assert loaded.loader is not None
        syntax = loaded.parse(loaded.loader.get_source(loaded, name)[0], name)
        found |= jinja2.meta.find_undeclared_variables(syntax)
        done.add(name)
        included = (node.template for node in syntax.find_all(jinja2.nodes.Include))
        waiting += [one.value for one in included if isinstance(one, jinja2.nodes.Const) and one.value not in done]
    return found


def render_slots(path: Path, device: str, slots: Slots, config: Config, problem: object) -> str:
    """The text of a loop kernel."""
    names: dict[str, object] = {**dict(config.values), "config": config, "problem": problem}
    names |= {one.name: getattr(slots, one.name) for one in fields(slots)}
    text = tidy(_environment(path, device).get_template(path.name).render(names))
    return with_line_marks(text, _folders(path, device), "cpp" if device == "cpu" else "python")
