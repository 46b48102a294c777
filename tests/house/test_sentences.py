"""The documents have short sentences, and `tools.sentences` counts their words."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tools.sentences import documents, main, sentences, words

# Words of a sentence, in the middle of each document.
AT_MOST = 16

TEXT = """# A title that is none

One sentence. `kgen/cli.py` is
another one, with a [link to it](somewhere.md)!

    code that is none

| a table | too |

1. First item
2. Second item. It has two.
"""


def test_prose_is_cut_into_sentences() -> None:
    found = ["One sentence.", "`code` is another one, with a link to it!", "First item", "Second item.", "It has two."]
    assert list(sentences(TEXT)) == found
    assert words(found[1]) == 9


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_sentences_are_short(document: Path) -> None:
    assert median([words(one) for one in sentences(document.read_text())] or [0]) <= AT_MOST


def test_the_command_prints_the_longest_and_fails_above_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    document = documents()[0]
    assert main(["--longest", "1", "--at-most", "99", str(document)]) == 0
    assert document.name in capsys.readouterr().out
    assert main(["--at-most", "0", str(document)]) == 1
