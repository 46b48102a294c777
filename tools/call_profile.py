"""Which files of kgen one relu executes while it is compiled and first called, in a fresh process.

    python -m tools.call_profile [--list] [--at-most 40] [--json FILE]

A file counts when one of its functions is entered, in any thread. What runs while a module is imported does not count: it tells
what the module defines, not what the compilation goes through. Exits with 1 when more files than `--at-most` are executed.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kgen.backend import kgen_backend

ROOT = Path(__file__).resolve().parent.parent


class CallProfile:
    """Counts the entered functions of files below some folders, in all threads, while it is open."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = tuple(f"{folder}/" for folder in folders)
        self.calls: Counter[str] = Counter()
        self.importing = threading.local()

    def __enter__(self) -> CallProfile:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        depth = getattr(self.importing, "depth", 0)
        if code.co_name == "<module>":
            self.importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth and code.co_filename.startswith(self.folders):
            self.calls[code.co_filename] += 1


def package_folders() -> list[Path]:
    """The folders that packages are made of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return sorted({ROOT / folder for folder in project["tool"]["setuptools"]["package-dir"].values()})


def profile_of(action: Callable[[], object]) -> Counter[str]:
    """Calls by file of kgen, as paths below the root."""
    with CallProfile(package_folders()) as profile:
        action()
    files = {name: count for name, count in profile.calls.items() if name.endswith(".py")}
    return Counter({Path(name).relative_to(ROOT).as_posix(): count for name, count in files.items()})


def first_relu() -> Counter[str]:
    x = torch.randn(8, 1000)
    compiled = torch.compile(torch.relu, backend=partial(kgen_backend, options={"cache": False}))
    return profile_of(lambda: compiled(x))


def packages(calls: Counter[str]) -> dict[str, int]:
    """Files of each folder."""
    return dict(sorted(Counter(str(Path(name).parent) for name in calls).items()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="every file, with the number of calls")
    parser.add_argument("--at-most", type=int, help="files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    calls = first_relu()
    if options.list:
        print("\n".join(f"{count:7} {name}" for name, count in sorted(calls.items())))
    print("\n".join(f"{count:7} files of {folder}" for folder, count in packages(calls).items()))
    print(f"{len(calls):7} files")
    if options.json:
        options.json.write_text(json.dumps({"files": len(calls), "packages": packages(calls), "calls": dict(calls)}, indent=1))
    return int(options.at_most is not None and len(calls) > options.at_most)


if __name__ == "__main__":
    sys.exit(main())
