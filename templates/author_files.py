"""Where an author's class and its Jinja file are: files beside each other, or the text itself, for notebooks."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

__all__ = ["line_of", "source_file", "version_of"]

# What a Jinja file is called that was given as text.
SUFFIX = {"cuda": ".py.jinja", "cpu": ".cpp.jinja"}


def line_of(cls: type) -> str:
    """The file and the line where an author's class begins."""
    try:
        return f"{inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # made at run time, or in a notebook
        return ""


def source_file(cls: type, source: str, device: str, fail: Callable[[str], Exception]) -> Path:
    """The Jinja file beside the module that declares the class; where `source` has several lines it is the file's text."""
    if len(source.splitlines()) > 1:
        return _written(cls, source, SUFFIX[device])
    module = _module_file(cls)
    if module is None:
        raise fail("its class is in no file, so nothing is beside it: give the text of the Jinja file as source")
    path = module.parent / source
    if not path.is_file():
        raise fail(f"there is no file {path}")
    return path


def version_of(cls: type, path: Path) -> str:
    """A digest of the Jinja file and of the module that declares the template; of a class in a notebook, its methods."""
    digest, module = hashlib.sha256(path.read_bytes()), _module_file(cls)
    digest.update(_code(cls) if module is None else module.read_bytes())
    return digest.hexdigest()[:12]


def _module_file(cls: type) -> Path | None:
    """The file of the class; None in a notebook or a prompt."""
    try:
        path = Path(inspect.getfile(cls))
    except (OSError, TypeError):
        return None
    return path if path.is_file() else None


def _code(cls: type) -> bytes:
    """The methods and the values of a class that has no file."""
    of_any = vars(type("Plain", (), {}))
    found = [
        (name, marshal.dumps(value.__code__) if isinstance(value, FunctionType) else repr(value))
        for name, value in sorted(vars(cls).items())
        if name not in of_any
    ]
    return repr(found).encode()


def _written(cls: type, text: str, suffix: str) -> Path:
    """A text has one file in every process: generated code names its lines."""
    path = _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{cls.__name__.lower()}{suffix}"
    if not path.is_file() or path.read_text() != text:
        writing = path.with_name(f".writing-{os.getpid()}-{path.name}")  # another process may read meanwhile
        writing.write_text(text)
        writing.replace(path)
    return path


def _folder() -> Path:
    """The user's own below the one for temporary files."""
    folder = Path(tempfile.gettempdir()) / f"kgen-templates-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    mine = folder.stat().st_uid == os.getuid()
    return folder if mine else Path(tempfile.mkdtemp(prefix="kgen-templates-"))
