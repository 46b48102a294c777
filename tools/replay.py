"""Whether two commits make the same kernels: renders a corpus without compiling it, and compares the texts.

    python -m tools.replay render --out FOLDER [--only memory/softmax ...] [--devices gpu] [--all]
    python -m tools.replay diff BEFORE AFTER [--ignore-verdicts] [--ignore-imports] [--kernels-only]
    python -m tools.replay between COMMIT_A COMMIT_B [the options of both]

`render` makes a folder a case and device, and in it one a graph: `steps.txt`, `verdicts.txt`, `calls.txt` (how kernels are
launched and compiled), and a file a kernel. `error.txt` says why a graph is missing. Nothing is compiled. The GPU is an H200
that need not exist; the CPU has AVX-512 and 16 threads. Folders are comparable when one machine made both.

`diff` exits with 1 where they differ. `--ignore-imports` leaves out from which modules of kgen kernels import.

`between` renders the corpus of this working tree with the kgen of each commit, through that commit's own
`tools/replay_adapter.py` (this one's where it has none), then compares. `--own-benches` takes the corpus and the benches of
each commit, too. `--keep` leaves both renderings for `diff`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tools import replay_adapter as adapter
from tools.replay_adapter import Texts
from tools.replay_corpus import Case, corpus
from tools.replay_graphs import call

ROOT = Path(__file__).resolve().parent.parent
OWN_IMPORT = re.compile(r"^(from|import) kgen\.[\w.]+( import \w+)?(?= as )", re.MULTILINE)


# ---- rendering ---------------------------------------------------------------------------------------------------------


def render(out: Path, cases: Sequence[tuple[Case, str]]) -> dict[str, str]:
    """Renders each case for its device into a folder of its own; the errors by case."""
    shutil.rmtree(out, ignore_errors=True)
    errors = {}
    for number, (case, device) in enumerate(cases):
        started = time.perf_counter()
        folder = out / device / _file_name(case.name)
        folder.mkdir(parents=True)
        error = _render_case(case, device, folder)
        if error:
            errors[f"{device}/{case.name}"] = error
            _write(folder / "error.txt", error)
        seconds = time.perf_counter() - started
        print(f"[{number + 1}/{len(cases)}] {device} {case.name}: {seconds:.1f} s {error.rstrip()}", file=sys.stderr)
    return errors


def _render_case(case: Case, device: str, folder: Path) -> str:
    """Writes the graphs of a case; the error that ended it, if one did."""
    count = 0

    def keep(texts: Texts) -> None:
        nonlocal count
        write_graph(folder / f"{count}_{texts.role}", texts)
        count += 1

    adapter.settle()
    try:
        call(case, device, adapter.door(case.options), partial(adapter.rendering, keep))
    except adapter.Stopped:
        return ""
    except Exception as cause:  # noqa: BLE001 - the others are still rendered
        traceback.print_exc()
        return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}\n"
    return "" if count else "no graph was compiled\n"


def write_graph(folder: Path, texts: Texts) -> None:
    folder.mkdir()
    for name, text in (("steps.txt", texts.steps), ("verdicts.txt", texts.verdicts), ("calls.txt", texts.calls)):
        _write(folder / name, text)
    for name, text in texts.kernels.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w./+-]+", "_", name)


def chosen(options: argparse.Namespace) -> list[tuple[Case, str]]:
    """The cases of a command line, each with a device."""
    every = [(case, device) for case in corpus(options.all) for device in case.devices if device in options.devices]
    return [(case, device) for case, device in every if not options.only or any(part in case.name for part in options.only)]


# ---- comparing ---------------------------------------------------------------------------------------------------------


def differences(before: Path, after: Path, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """What differs, each with a unified diff: files of one folder alone, and those of unequal text."""
    names = sorted({p.relative_to(root).as_posix() for root in (before, after) for p in root.rglob("*") if p.is_file()})
    for name in (n for n in names if _compared(n, options)):
        old, new = (_lines(root / name, options) for root in (before, after))
        if old != new:
            kind = "only after" if not old else "only before" if not new else "differs"
            yield f"{name}: {kind}", list(difflib.unified_diff(old, new, "before", "after", lineterm=""))


def _compared(name: str, options: argparse.Namespace) -> bool:
    if options.kernels_only:
        return name.endswith((".py", ".cpp", "error.txt"))
    return not (options.ignore_verdicts and name.endswith("verdicts.txt"))


def _lines(path: Path, options: argparse.Namespace) -> list[str]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return (OWN_IMPORT.sub(r"\1 kgen", text) if options.ignore_imports else text).splitlines()


def compare(before: Path, after: Path, options: argparse.Namespace) -> int:
    """Prints what differs; 1 if anything does."""
    found = list(differences(before, after, options))
    for title, lines in found:
        print(f"==== {title}")
        print("\n".join(lines[: options.lines]))
        if len(lines) > options.lines:
            print(f"... {len(lines) - options.lines} more lines")
    graphs = {title.rpartition("/")[0] for title, _ in found}
    print(f"{len(found)} files of {len(graphs)} graphs differ" if found else "no differences")
    return bool(found)


# ---- two commits -------------------------------------------------------------------------------------------------------


def between(options: argparse.Namespace) -> int:
    """Renders the corpus with the kgen of each commit, and compares."""
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        roots = [Path(scratch, side) for side in ("before", "after")]
        outs = [(options.keep or side) / side.name for side in roots]
        trees = [Path(scratch, f"{side.name}-tree") for side in roots]
        try:
            for commit, tree, side in zip((options.before, options.after), trees, roots, strict=True):
                _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
                importable(tree, side, options.own_benches)
            _render_both(roots, outs, options)
            return compare(outs[0], outs[1], options)
        finally:
            for tree in trees:
                _git("worktree", "remove", "--force", str(tree), check=False)


def _render_both(roots: Sequence[Path], outs: Sequence[Path], options: argparse.Namespace) -> None:
    if not options.parallel:
        for side, out in zip(roots, outs, strict=True):
            _finish(_render_apart(side, out, options))
        return
    for process in [_render_apart(side, out, options) for side, out in zip(roots, outs, strict=True)]:
        _finish(process)


def importable(tree: Path, side: Path, own_benches: bool = False) -> None:
    """A folder from which a commit's packages can be imported: kgen as its pyproject.toml lays it out, this tool, and
    the benches of this working tree or of the commit."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())
    for package, folder in sorted(project["tool"]["setuptools"]["package-dir"].items()):
        place = side / package.replace(".", "/")
        if "." in package:
            place.symlink_to(tree / folder)
            continue
        place.mkdir(parents=True)
        for child in (tree / folder).iterdir():
            (place / child.name).symlink_to(child)
    for name in ("bench", "examples", "tests"):
        (side / name).symlink_to((tree if own_benches else ROOT) / name)
    (side / "tools").mkdir()
    for path in (ROOT / "tools").glob("replay*.py"):
        own = tree / "tools" / path.name
        takes_own = path.name == "replay_adapter.py" or (own_benches and path.name == "replay_corpus.py")
        (side / "tools" / path.name).symlink_to(own if takes_own and own.exists() else path)


# Without the finder of an editable installation: it would give what a commit lacks from this working tree.
ISOLATED = """
import runpy, sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
runpy.run_module("tools.replay", run_name="__main__", alter_sys=True)
"""


def _render_apart(side: Path, out: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Renders in a process that imports what is in `side`."""
    command = [sys.executable, "-c", ISOLATED, "render", "--out", str(out.absolute()), "--devices", *options.devices]
    command += ["--all"] * options.all + (["--only", *options.only] if options.only else [])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(command, cwd=side, env=environment | {"PYTHONDONTWRITEBYTECODE": "1"})


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)


def _git(*command: str, check: bool = True) -> None:
    subprocess.run(["git", *command], cwd=ROOT, check=check)


# ---- the command line --------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rendering, diffing, both = (commands.add_parser(name) for name in ("render", "diff", "between"))
    rendering.add_argument("--out", type=Path, required=True)
    diffing.add_argument("before", type=Path)
    diffing.add_argument("after", type=Path)
    both.add_argument("before", help="a commit")
    both.add_argument("after", help="a commit")
    both.add_argument("--own-benches", action="store_true", help="each commit's patterns, not those of this working tree")
    both.add_argument("--keep", type=Path, help="a folder for both renderings, which `diff` can compare again")
    both.add_argument("--parallel", action="store_true", help="both commits at once")
    for one in (rendering, both):
        one.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these")
        one.add_argument("--devices", nargs="+", choices=("cpu", "gpu"), default=["cpu", "gpu"])
        one.add_argument("--all", action="store_true", help="every problem of the calibration set")
    for one in (diffing, both):
        one.add_argument("--ignore-verdicts", action="store_true")
        one.add_argument("--ignore-imports", action="store_true", help="from where kernels import kgen's modules")
        one.add_argument("--kernels-only", action="store_true", help="no steps, verdicts and calls")
        one.add_argument("--lines", type=int, default=60, help="of each difference")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "diff":
        return compare(options.before, options.after, options)
    if options.command == "between":
        return between(options)
    with tempfile.TemporaryDirectory(prefix="replay-cache-") as cache:
        os.environ["KGEN_CACHE_DIR"] = cache  # nobody's measurements
        errors = render(options.out, chosen(options))
    print(f"{len(errors)} errors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
