"""Checks, before anything is installed, that this machine can build and run kgen. Runs on any Python 3, without packages."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

MINIMUM_PYTHON = (3, 11)
MINIMUM_COMPILER = 11


def problems():
    """Yields one sentence a problem: what is missing and how to get it."""
    if sys.version_info < MINIMUM_PYTHON:
        yield (
            "Python %d.%d is too old: install python3 3.11 or newer, or name one with `make PYTHON=...`" % sys.version_info[:2]
        )
    yield from missing_modules()
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        yield "Python.h is missing: install the headers of this Python (on Debian and Ubuntu: python3-dev)"
    yield from compiler_problems()


def missing_modules():
    try:
        import ensurepip  # noqa: F401, PLC0415
        import venv  # noqa: F401, PLC0415
    except ImportError:
        yield "this Python cannot make virtual environments: install its venv module (on Debian and Ubuntu: python3-venv)"


def compiler_problems():
    compiler = os.environ.get("KGEN_CXX") or os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        yield "no C++ compiler: %r is not on PATH; install g++ %d or newer, or set KGEN_CXX" % (compiler, MINIMUM_COMPILER)
        return
    text = subprocess.run([compiler, "-dumpversion"], stdout=subprocess.PIPE, check=False).stdout.decode()
    found = re.match(r"\d+", text)
    is_gcc = "g++" in os.path.basename(compiler)
    if is_gcc and found and int(found.group()) < MINIMUM_COMPILER:
        yield "%s is version %s: install g++ %d or newer, or set KGEN_CXX" % (compiler, text.strip(), MINIMUM_COMPILER)


def main():
    found = list(problems())
    for line in found:
        sys.stderr.write("kgen: %s\n" % line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
