"""The check of words: what counts as a private term, and a baseline that only falls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import vocabulary


def terms_of(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [term for term, _ in vocabulary.places(path, name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def product_of(x): ...\n", ["product"]),
        ("class MatrixProduct: ...\n", ["product"]),
        ("x = ix.product(extents)\n", []),
        ("# the inner product of two rows\n", []),
        ("# the product of two matrices\n", ["product"]),
        ("# sums of products, and a running product\n", []),
        ("# a sum of some products\n", ["product"]),
        ("F.scaled_dot_product_attention(q, k, v)\n", []),
        ("PROCESSORS = multi_processor_count\n", ["processor"]),
        ("class Kitchen: ...\n", ["kitchen"]),
        ("x = joint_graph(y)\n", []),
        ("x = joint_of(y)\n", ["joint"]),
        ('"""One kernel computes it twice, and the two look alike."""\n', ["alike"]),
        ('raise ValueError("an excerpt of the graph")\n', ["excerpt"]),
        ("NAME = 'excerpt'\n", []),
        ("warp_specialized = specialized_matmul\n", ["specialized"]),
        ("# read ahead of time\n", []),
        ("# rows are fetched ahead\n", ["ahead"]),
        ("def test_an_excerpt_of_an_excerpt(): ...\n", ["excerpt", "excerpt"]),
        ("rows, lines, parts, stored = said_so, 1, 2, once_more\n", ["said"]),
    ],
)
def test_terms_in_python(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert terms_of(tmp_path, "module.py", text) == expected


def test_terms_elsewhere(tmp_path: Path) -> None:
    assert terms_of(tmp_path, "scheduler/twice.py", "") == ["twice"]
    assert terms_of(tmp_path, "a.h", "int pieces = 1; // what reads it\n") == ["pieces", "what reads it"]
    assert terms_of(tmp_path, "a.py.jinja", "{{ slots.PARTS }}\n") == ["parts"]
    assert terms_of(tmp_path, "a.md", "An *excerpt* of `product_of`.\n") == ["excerpt"]


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""One.\n\nAn excerpt.\n"""\nkitchen = 1\n')
    assert [str(place) for _, place in vocabulary.places(path, "a.py")] == ["a.py:3: An excerpt.", "a.py:5: kitchen"]


def test_a_count_that_rises_says_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert vocabulary.check({"excerpt": 3}, {"excerpt": 2}) == 1
    shown = capsys.readouterr().out
    assert "say subgraph extraction instead" in shown
    assert "--list 'excerpt'" in shown


def test_a_baseline_only_falls() -> None:
    assert vocabulary.lowered({"excerpt": 3, "kitchen": 1, "twice": 5}, {"excerpt": 2, "kitchen": 4}) == {
        "excerpt": 2,
        "kitchen": 1,
        "twice": 5,
    }
    assert vocabulary.check({"excerpt": 2}, {"excerpt": 2}) == 0
    assert vocabulary.check({"excerpt": 1}, {"excerpt": 2}) == 0


def test_the_command_checks_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kgen").mkdir()
    module = tmp_path / "kgen" / "a.py"
    module.write_text("excerpt = 1\n")
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    monkeypatch.setattr(vocabulary, "BASELINE", tmp_path / "baseline.json")
    assert vocabulary.main(["--update"]) == 0
    assert json.loads((tmp_path / "baseline.json").read_text())["excerpt"] == 1
    module.write_text("excerpt = excerpts = 1\n")
    assert vocabulary.main(["--update"]) == 1
    assert vocabulary.main([]) == 1
    capsys.readouterr()
    assert vocabulary.main(["--list", "excerpt"]) == 0
    assert capsys.readouterr().out.splitlines() == ["kgen/a.py:1: excerpt", "kgen/a.py:1: excerpts"]


def test_the_baseline_has_the_terms_of_the_table() -> None:
    assert json.loads(vocabulary.BASELINE.read_text()).keys() <= vocabulary.BY_TERM.keys()
