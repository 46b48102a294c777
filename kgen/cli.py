"""The command line, ``kgen explain`` and so on. A command's module is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgen import __version__
from kgen.errors import KgenError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

__all__ = ["main", "parse"]

INTERRUPTED = 130
SCRIPT = "flags that are not kgen's, and all after `--`, are the script's own"


class Parser(argparse.ArgumentParser):
    """Says which command, action or flag a misspelled one is like."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            valid = [str(one) for one in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value!r}; {_near(str(value), valid)}use one of: {', '.join(valid)}"
            )

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def commands(self) -> dict[str, Parser]:
        """Commands, or the actions of one."""
        found = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next((action.choices for action in found), {})

    def nearest(self, unknown: Sequence[str]) -> str:
        """A question about the first of some flags that is like one of this command's; empty where none is."""
        flags = [flag for flag in self.flags if flag.startswith("--")]
        return next(filter(None, (_near(one.partition("=")[0], flags).strip() for one in unknown if one.startswith("--"))), "")


def _near(name: str, valid: Sequence[str]) -> str:
    from kgen.option_names import near  # noqa: PLC0415  only after a mistake

    return near(name, valid)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        module, _, function = options.run.partition(":")
        code: int = getattr(importlib.import_module(f"kgen.commands.{module}"), function)(options)
        sys.stdout.flush()
        return code
    except KgenError as error:
        print(f"kgen: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("kgen: interrupted", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, whatever their order. `arguments` of the namespace are those of the user's script.

    Raises SystemExit, as argparse does."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = _parser()
    words = _ordered(parser, given[:end])
    if words and words[0].startswith("--") and words[0] not in parser.flags:
        parser.error(" ".join(["unrecognized arguments:", words[0], parser.nearest(words[:1])]).strip())
    options, unknown = parser.parse_known_args(words)
    own = [*unknown, *given[end + 1 :]]
    if own and not options.takes_script:
        question = options.parser.nearest(own)
        options.parser.error(f"unrecognized arguments: {' '.join(own)}{'; ' if question else ''}{question}")
    if unknown and (question := options.parser.nearest(unknown)):
        note = (
            f"kgen: the script gets {' '.join(unknown)}; {question} What stands behind `--` is the script's without this line"
        )
        print(note, file=sys.stderr)
    options.arguments = own
    return options


def _ordered(parser: Parser, words: list[str]) -> list[str]:
    """The words with a command, and its action, in front of their flags."""
    known = parser.commands
    at = next((k for k, word in enumerate(words) if word in known), None)
    if at is None or words[0] in parser.flags or not (at == 0 or words[0].startswith("-")):
        return words
    return [words[at], *_ordered(known[words[at]], [*words[:at], *words[at + 1 :]])]


def _parser() -> Parser:
    parser = Parser(
        prog="kgen", description="A torch.compile backend in which every kernel is a template with slots.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kgen {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    one = _command(commands, "explain", "say what kgen makes of a script or a function", "explain_command:run", script=True)
    one.add_argument("target", help="script.py, run with every kgen compilation reported; or module:function")
    one.add_argument("--json", action="store_true", help="print the report as JSON")
    one.add_argument("--source", action="store_true", help="also print the generated kernels")
    one.add_argument("--html", metavar="FILE", type=Path, help="write the report as one page of HTML")
    one.add_argument("--top", metavar="N", type=int, help="list so many refusals, and kernels of each graph")
    one.add_argument(
        "--why", metavar="NAME", nargs="+", help="the verdicts about a kernel, an operator or a module, or about two"
    )
    one.add_argument("--kernel", metavar="N", help="all about one kernel: its number, from 0, or its name")
    one.add_argument("--mode", help="compile in this mode (max-autotune, ...)")

    two = _command(
        commands,
        "bisect",
        "find the smallest part of a script that is wrong, dies or is slow",
        "bisect_command:run",
        script=True,
    )
    two.add_argument("target", metavar="script.py", type=Path, help="run with every call repeated in eager")
    two.add_argument("--speed", action="store_true", help="find what is slower than eager, and by which kernel")
    two.add_argument("--seconds", metavar="N", type=_positive, default=300.0, help="one call that takes longer hangs")
    two.add_argument("--in-process", action="store_true", help="run in this process: a crash ends the command")
    two.add_argument("--module", action="append", default=[], help="import this module first; the script written does so, too")
    two.add_argument("--out", metavar="FOLDER", type=Path, default=Path("kgen_bisect"), help="where that script goes")
    two.add_argument("--trials", metavar="N", type=_count, default=300, help="compile so many parts at most")
    two.add_argument("--journal", type=Path, help=argparse.SUPPRESS)  # of the process that --in-process was left out for
    two.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)

    _cache_parser(commands.add_parser("cache", help="look at, empty and exchange what is kept on disk"))

    _templates_parser(commands.add_parser("templates", help="list, show, begin and check templates"))

    three = _command(commands, "doctor", "check that this machine can compile", "doctor_command:run")
    three.add_argument("--json", action="store_true", help="print the checks as JSON")

    four = _command(
        commands, "tune", "run a script in a max-autotune mode, say what was measured", "tune_command:tune", script=True
    )
    four.add_argument("target", metavar="script.py", type=Path)
    four.add_argument("--file", type=Path, help="the tuning file to add to")
    four.add_argument("--seconds", type=float, help="how long to measure for one graph")
    four.add_argument("--suggest", action="store_true", help="measure nothing: say what nobody has measured, the slowest first")

    five = _command(
        commands, "completion", "print what makes a shell complete kgen's commands", "completion_command:completion"
    )
    five.add_argument("shell", choices=("bash", "zsh", "fish"))
    five.set_defaults(root=parser)
    return parser


def _count(text: str) -> int:
    """A number from 1 on; argparse takes the error's text."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    """A number of seconds above zero; argparse takes the error's text."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above zero")
    return found


def _command(commands: Commands, name: str, text: str, run: str, script: bool = False) -> Parser:
    """A command whose function is `run`, ``module:function`` below `kgen.commands`."""
    made = commands.add_parser(name, help=text, epilog=SCRIPT if script else None, allow_abbrev=False)
    made.set_defaults(run=run, takes_script=script, parser=made)
    return made


def _templates_parser(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")
    made = {
        name: _command(actions, name, text, f"templates_command:{function}")
        for name, function, text in (
            ("list", "list_all", "every template"),
            ("show", "show", "what a template declares"),
            ("check", "check", "try a template on problems of every kind"),
            ("new", "new", "write a template to begin with, in this folder"),
        )
    }
    made["why"] = _command(
        actions, "why", "say of each kernel of a script why the template has it or not", "templates_why:why", True
    )
    for name in ("show", "check", "new", "why"):
        made[name].add_argument("name", metavar="NAME")
    made["why"].add_argument("target", metavar="script.py", type=Path)
    made["why"].add_argument("--mode", help="compile in this mode (max-autotune, ...)")
    for name in ("list", "show", "check", "why"):
        made[name].add_argument("--module", action="append", default=[], help="import this module, which declares templates")
    made["new"].add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cuda: a matmul in Triton; cpu: an operator of its own in C++"
    )
    made["check"].add_argument("--configs", type=_count, default=3, help="configurations of each problem")
    made["check"].add_argument("--only", metavar="TEXT", action="append", default=[], help="problems with this in their text")
    made["check"].add_argument("--seconds", type=_positive, help="begin no further problem after so long")


def _cache_parser(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="action")
    for name, function, text in (
        ("list", "list_entries", "every entry"),
        ("stats", "stats", "how many entries there are, and their size"),
        ("clear", "clear", "remove entries; measurements only with --kind tuning"),
    ):
        one = _command(actions, name, text, f"cache_command:{function}")
        one.add_argument("--kind", help="only entries of this kind (cpp, header, runtime, ..., or tuning)")

    merge = _command(actions, "merge", "add the measurements of some tuning files to one", "cache_command:merge")
    merge.add_argument("out", metavar="OUT", type=Path, help="the file to add to; it need not exist")
    merge.add_argument("files", metavar="IN", type=Path, nargs="+")

    diff = _command(actions, "diff", "the problems for which two tuning files have other choices", "cache_command:difference")
    diff.add_argument("before", metavar="A", type=Path)
    diff.add_argument("after", metavar="B", type=Path)
    diff.add_argument("--times", action="store_true", help="problems with other times and the same choice, too")

    export = _command(actions, "export", "write your measurements to a new file", "cache_command:export")
    export.add_argument("out", metavar="OUT", type=Path)
    export.add_argument("--device", metavar="NAME", help="only those of this device, as `cache list --kind tuning` calls it")
