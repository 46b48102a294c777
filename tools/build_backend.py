"""setuptools' build backend, and editable installs that also work in a folder that holds a clone.

An editable install of setuptools finds `kgen` after Python's own search. In a folder that holds a clone called `kgen`, that
search ends at the clone itself: a namespace package without any of kgen's names. So the wheel of an editable install has a
package `kgen` as well, which Python prefers to a namespace. It runs `kgen/__init__.py` of the clone.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # the hooks that stay as they are
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist",
    "get_requires_for_build_wheel", "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip

PACKAGE = """# Of an editable install: the package is the clone's.
__file__ = {init!r}
__path__ = [{folder!r}]
with open(__file__, encoding="utf-8") as _source:
    exec(compile(_source.read(), __file__, "exec"))
"""


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The file name of a wheel that points at this folder."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    folder = Path.cwd() / "kgen"
    add_file(
        Path(wheel_directory) / name, "kgen/__init__.py", PACKAGE.format(init=str(folder / "__init__.py"), folder=str(folder))
    )
    return name


def add_file(wheel, place, text):
    """Adds a file to a wheel, with its line in RECORD."""
    with zipfile.ZipFile(wheel) as old:
        files = {name: old.read(name) for name in old.namelist()}
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    files[place] = text.encode()
    files[record] += f"{place},sha256={digest},{len(text.encode())}\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in files.items():
            new.writestr(name, data)
