"""Words that are not to come back: private terms for what the field has a word for.

    python -m tools.vocabulary                  # counts against tools/vocabulary_baseline.json; 1 where one has risen
    python -m tools.vocabulary --list excerpt   # where a word stands
    python -m tools.vocabulary --update         # lowers the baseline to what is there; it never raises it

It looks at names of files, at identifiers, and at prose: comments, docstrings, messages, documents, names of tests. `WORDS` has
a pattern for each of these, and none where a term is ordinary English as well.

Branches that were written side by side may raise a count together: delete the baseline and write it anew with `--update`.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).resolve().with_name("vocabulary_baseline.json")
FOLDERS = ("kgen", "lowering", "scheduler", "templates", "tests", "bench", "examples", "tools", "docs")
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
CODE = (".h", ".cpp", ".jinja")
# What is about the words themselves, or about the past. docs/ir.md and docs/reference repeat docstrings, which
# count where they are written.
# Two benches can still be called by their old names.
EXEMPT = (
    "tools/vocabulary.py", "tests/house/test_vocabulary.py", "docs/decisions/", "docs/glossary.md", "docs/ir.md",
    "docs/reference/",
    "bench/gpu_products.py", "bench/cpu_products.py",
)  # fmt: skip


@dataclass(frozen=True)
class Word:
    """A term, what to say instead, and where it counts: regular expressions for the stem of a file's name, for identifiers (as
    written, and in snake case), and for lines of prose. An empty one finds nothing."""

    term: str
    say: str
    identifier: str = ""
    prose: str = ""
    stem: str = ""


def _part(words: str) -> str:
    """One of the words as a part of an identifier."""
    return rf"(?:^|_)(?:{words})(?:_|$)"


# Before "product" where it is one of numbers: a sum of products, a running product, `ix.product`.
_ARITHMETIC = "".join(
    f"(?<!{words})"
    for words in (
        "inner ", "outer ", "dot ", "cross ", "partial ", "absolute ", "running ", "sum of ", "sums of ", "sum or ",
        "sum or a ", "sums, ", "squares and ", r"\.",
    )
)  # fmt: skip
WORDS = (
    Word(
        "product", "matmul, GEMM, contraction", rf"^Product$|(?!^_?product$)(?<!dot){_part('products?')}",
        rf"{_ARITHMETIC}\bproducts?\b(?! of (?:the )?(?:sizes|extents|lengths|numbers))", _part("products?"),
    ),
    Word("copy engine", "TMA", "copy_engine", r"\bcopy engines?\b"),
    Word(
        "processor", "SM (GPU); core, thread (CPU)", r"^(?!multi_processor_count$|processor$)(?:.*_)?processors?(?:_|$)",
        r"(?<!RISC System/6000 )\bprocessors?\b",
    ),
    Word("group of warps", "warp group", "who_multiplies", r"\bgroups? of warps\b|\bwho multiplies\b"),
    Word(
        "turns", "stage, ring buffer, ping-pong, cooperative", r"(?:await|pass)_turns?|^turns$|^TOGETHER$",
        r"\b(?-i:TOGETHER)\b",
    ),
    Word("boxes", "epilogue subtile, TMA box", _part("boxes"), r"\bboxes\b", _part("boxes")),
    Word("parts", "epilogue subtile", r"^PARTS$|column_parts|(?:^|_)mm_parts", r"\b(?-i:PARTS)\b"),
    Word("sides", "epilogue, prologue", _part("sides")),
    Word("pieces", "split output, split-K", _part("pieces?"), r"\bpieces?\b", _part("pieces?")),
    Word("partials", "tile partials", r"^partials$", "", "^partials$"),
    Word("twice", "rematerialise, recompute", _part("twice"), r"\b(?:computed?|computes|made) twice\b", _part("twice")),
    Word(
        "joint", "horizontal fusion, grouped GEMM", rf"(?!joint_(?:pass|graph)){_part('joint|jointly')}",
        r"\bjoint (?:kernel|loop|launch|product|matmul|step)s?\b", _part("joint"),
    ),
    Word("siblings", "horizontal fusion", _part("siblings?"), r"\bsiblings?\b"),
    Word("batch of kernels", "combo (multi-tensor) kernel", r"^Batch$", "", "^batch$"),
    Word("what reads it", "consumer", "", r"\bwhat reads (?:it|them)\b"),
    Word("side sums", "operand reduction", _part("side_sums?"), r"\bside sums?\b", "side_sums?"),
    Word("whole rows", "full-row tile", _part("whole_rows?|held"), r"\bwhole rows?\b", r"^rows$|(?<!few)_rows$|^rows_"),
    Word("slices", "concat split", _part("slices"), "", "^slices$"),
    Word("scales", "scale hoisting", "", "", "^scales$"),
    Word(
        "aligned copies", "operand padding, operand materialisation", _part("operand_copies|made_first"),
        r"\bmade first\b", "^aligned$",
    ),
    Word("updates", "scatter epilogue", _part("updates"), "", _part("updates")),
    Word("picks", "gather as masked reduction", _part("picks"), "", _part("picks")),
    Word("alike", "memo", _part("alike"), r"\balike\b", _part("alike")),
    Word("remembered", "memo", _part("remembered|remembers"), r"\bremember(?:ed|s)\b"),
    Word("once", "memo, memoise", "^once$", "", "^once$"),
    Word("excerpt", "subgraph extraction", _part("excerpts?"), r"\bexcerpts?\b", _part("excerpts?")),
    Word("kitchen", "candidate compiler", _part("kitchens?"), r"\bkitchens?\b"),
    Word("contest", "benchmark job", _part("contests?|contestants?"), r"\bcontests?\b"),
    Word("answer", "tuning result", _part("answers?"), "", _part("answers?")),
    Word("said", "tuning result", _part("said")),
    Word("lends", "alias, storage", _part("lends?|lent|lenders?"), r"\b(?:lends?|lent)\b"),
    Word("hides", "alias, base buffer", _part("hides?")),
    Word("places", "alias, storage, base buffer", _part("places")),
    Word("nests", "tile loop, vector loop", _part("nests"), "", "^nests$"),
    Word("walks", "tile loop, epilogue loop", _part("walks"), "", "^walks$"),
    Word("ahead", "prefetch", _part("ahead"), r"\bahead\b(?!-of-time| of time)", _part("ahead")),
    Word(
        "specialized", "warp-specialized", rf"(?<!warp){_part('specialized')}",
        r"(?<!warp[- ])\bspecialized (?:product|matmul|kernel|template)s?\b", "(?<!warp_)specialized",
    ),
    Word("resident", "B-resident", rf"(?<!b){_part('resident')}", "", r"(?<!b_)resident"),
    Word("sliced", "sliced-K", r"(?:^|_)sliced(?!_k)(?:_|$)", "", r"sliced(?!_k)"),
    Word("hardware", "intrinsics", "^hardware$", "", "^hardware$"),
    Word("dependent", "programmatic dependent launch, PDL", "^dependent$", "", "^dependent$"),
    Word("online", "online softmax", "^online$", "", "^online$"),
    Word("neighbours", "RNG block, adjacent lanes", _part("neighbours?"), "", "^neighbours$"),
    Word("lies", "index range, divisibility, contiguity", _part("straddles?|lies"), r"\b(?:lies|straddles?)\b"),
)  # fmt: skip
BY_TERM = {word.term: word for word in WORDS}


@dataclass(frozen=True)
class Place:
    """Where a word stands. Line 0 is the file's name."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: the name of the file"


# ---- what a file says --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """An identifier or a line of prose, and the number of its line."""

    line: int
    text: str
    prose: bool


def texts(path: Path) -> Iterator[Text]:
    """The identifiers and the prose of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _python(text)
    elif path.suffix == ".md":
        yield from (Text(number, line, True) for number, line in enumerate(text.splitlines(), 1))
    else:
        yield from _other_code(text)


def _python(text: str) -> Iterator[Text]:
    """Strings with a space are prose: docstrings and messages. So are the names of tests."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "NAME":
            sentence = token.string.startswith("test_")
            yield Text(token.start[0], token.string.replace("_", " ") if sentence else token.string, sentence)
        elif kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string):
            yield from (Text(token.start[0] + k, line, True) for k, line in enumerate(token.string.splitlines()))


def _other_code(text: str) -> Iterator[Text]:
    """C++ and templates: comments run from their sign to the end of the line."""
    lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if line != "#pragma once")
    for number, line in lines:
        code, sign, comment = re.split(r"(//|(?:^|\s)# |\{#)", line, maxsplit=1) if _COMMENT.search(line) else (line, "", "")
        yield from (Text(number, name, False) for name in _NAME.findall(code))
        if sign:
            yield Text(number, comment, True)


_COMMENT = re.compile(r"//|(?:^|\s)# |\{#")
_NAME = re.compile(r"[A-Za-z_]\w*")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake(name: str) -> str:
    """MatmulProduct and MATMUL_PRODUCT as matmul_product."""
    return _CAMEL.sub("_", name).lower()


# ---- counting ----------------------------------------------------------------------------------------------------------


def places(path: Path, name: str) -> Iterator[tuple[str, Place]]:
    """Each term in a file, as often as it stands there. `name` is the file's path below the root."""
    stem = path.name.partition(".")[0]
    yield from ((word.term, Place(name, 0, "")) for word in WORDS if word.stem and re.search(word.stem, stem))
    for text in texts(path):
        for term in terms_in_prose(text.text) if text.prose else terms_in_name(text.text):
            yield term, Place(name, text.line, text.text.strip())


@functools.cache
def terms_in_name(name: str) -> tuple[str, ...]:
    """The terms in an identifier, each once."""
    forms = (name, snake(name))
    return tuple(word.term for word in WORDS if word.identifier and any(re.search(word.identifier, form) for form in forms))


def terms_in_prose(line: str) -> Iterator[str]:
    """The terms in a line, each as often as it stands there."""
    for word, pattern in _PROSE:
        yield from (word.term for _ in pattern.finditer(line))


_PROSE = [(word, re.compile(word.prose, re.IGNORECASE)) for word in WORDS if word.prose]


def files(root: Path) -> Iterator[tuple[Path, str]]:
    """What is looked at, with its path below the root."""
    found = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in (*found, *(root / name for name in DOCUMENTS)):
        name = path.relative_to(root).as_posix()
        if path.is_file() and path.suffix in (".py", ".md", *CODE) and not name.startswith(EXEMPT):
            yield path, name


def survey(root: Path) -> dict[str, list[Place]]:
    """Where each term stands."""
    found: dict[str, list[Place]] = {word.term: [] for word in WORDS}
    for path, name in files(root):
        for term, place in places(path, name):
            found[term].append(place)
    return found


# ---- the ratchet -------------------------------------------------------------------------------------------------------


def risen(counts: Mapping[str, int], baseline: Mapping[str, int]) -> list[str]:
    """What to tell of each term that stands in more places than before."""
    return [
        f"{term!r} stands in {count} places, {baseline.get(term, 0)} are left: say {BY_TERM[term].say} instead "
        f"(python -m tools.vocabulary --list {term!r})"
        for term, count in counts.items()
        if count > baseline.get(term, 0)
    ]


def lowered(counts: Mapping[str, int], baseline: Mapping[str, int]) -> dict[str, int]:
    """The baseline with what is fewer now; terms that it does not have yet come with what is there."""
    return {term: min(count, baseline.get(term, count)) for term, count in counts.items()}


def check(counts: Mapping[str, int], baseline: Mapping[str, int]) -> int:
    complaints = risen(counts, baseline)
    fewer = sum(baseline[term] - counts.get(term, 0) for term in baseline) if not complaints else 0
    print("\n".join(complaints) or f"{sum(counts.values())} private terms are left")
    if fewer:
        print(f"{fewer} fewer than in the baseline: python -m tools.vocabulary --update")
    return bool(complaints)


def show(found: Iterable[Place]) -> None:
    print("\n".join(map(str, found)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="WORD", choices=list(BY_TERM))
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args(arguments)
    found = survey(ROOT)
    if options.list:
        show(found[options.list])
        return 0
    counts = {term: len(where) for term, where in found.items()}
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if options.update:
        BASELINE.write_text(json.dumps(lowered(counts, baseline), indent=1) + "\n")
    return check(counts, json.loads(BASELINE.read_text()) if options.update else baseline)


if __name__ == "__main__":
    sys.exit(main())
