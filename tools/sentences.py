"""How long the sentences of the documents are: words a sentence, by document.

    python -m tools.sentences [--at-most 16] [--longest 5] [DOCUMENT ...]

Prose counts: no code, tables, headings and lists' marks. `code` is one word. docs/ir.md and docs/reference repeat docstrings,
and decisions are dated: none of them counts. Exits with 1 where the median of all sentences is above `--at-most`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Tables, headings, indented code, figures and comments: lines that are no prose.
OTHER = re.compile(r"^(?:\||#| {4}|!\[|<!--).*$", re.MULTILINE)
MARK = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`\"'(*\[])")


LEFT_OUT = ("decisions", "reference")


def documents() -> list[Path]:
    """The documents whose words are written by hand, and hold today."""
    found = [
        path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name not in LEFT_OUT and path.name != "ir.md"
    ]
    return [*found, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a document; an item of a list begins a new one."""
    text = OTHER.sub("\n\n", FENCED.sub("\n\n", text))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", MARK.sub("\n\n", text))
    for paragraph in re.split(r"\n\s*\n", re.sub(r"`[^`\n]*`", "`code`", text)):
        joined = " ".join(paragraph.split())
        yield from (one for one in END.split(joined) if len(one.split()) > 1)


def words(sentence: str) -> int:
    return len(sentence.split())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path)
    parser.add_argument("--at-most", type=int, help="words, of the median of all sentences")
    parser.add_argument("--longest", type=int, default=0, help="so many of the longest sentences of each document")
    options = parser.parse_args(arguments)
    counts: list[int] = []
    for path in options.documents or documents():
        found = sorted(sentences(path.read_text()), key=words)
        own = [words(one) for one in found]
        counts += own
        print(f"{median(own or [0]):5} {len(own):5} sentences of {path.resolve().relative_to(ROOT)}")
        for one in reversed(found[len(found) - options.longest :] if options.longest else []):
            print(f"      {words(one):5} {one}")
    print(f"{median(counts):5} {len(counts):5} sentences")
    return int(options.at_most is not None and median(counts) > options.at_most)


if __name__ == "__main__":
    sys.exit(main())
