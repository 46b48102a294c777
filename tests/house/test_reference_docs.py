"""docs/reference is what the code says, and tutorials run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kgen import list_options
from kgen.config import VARIABLES
from tools import reference_docs

ROOT = Path(__file__).resolve().parent.parent.parent
# Each is a process that compiles several graphs: the first one that people read runs with the fast tests.
TUTORIALS = [
    pytest.param(path, id=path.stem, marks=() if path.stem == "five_minutes" else pytest.mark.slow)
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
]


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (reference_docs.FOLDER / name).read_text() == reference_docs.PAGES[name](), "run python -m tools.reference_docs"


def test_every_public_name_is_documented() -> None:
    text = (reference_docs.FOLDER / "api.md").read_text()
    sections = dict(re.findall(r"^## (kgen\.\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == {f"kgen.{name}" for name in reference_docs.public_names()}
    assert [name for name, body in sections.items() if len(body.split()) < 4] == []
    assert " at 0x" not in text


def test_every_option_and_variable_is_in_the_table() -> None:
    text = (reference_docs.FOLDER / "options.md").read_text()
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [one.name for one in list_options()]
    assert all(f"`{variable}`" in text for variable in VARIABLES)
    assert all(line.count(" | ") == 4 for line in text.splitlines() if line.startswith("| `"))


def test_every_error_says_what_to_do_or_is_a_base() -> None:
    text = (reference_docs.FOLDER / "errors.md").read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == [one.__name__ for one in reference_docs.error_classes()]
    assert len(reference_docs.error_classes()) > 50


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("decisions/")} == listed


def test_the_command_finds_an_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference_docs, "FOLDER", tmp_path)
    assert reference_docs.main(["--check"]) == 1
    assert "options.md is out of date" in capsys.readouterr().out
    assert reference_docs.main([]) == 0
    assert reference_docs.main(["--check"]) == 0


@pytest.mark.cpu
@pytest.mark.parametrize("path", TUTORIALS)
def test_a_tutorial_runs(path: Path, tmp_path: Path) -> None:
    """From the top, in a process and a folder of its own."""
    code = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert code
    if any("transformers" in block for block in code):
        pytest.importorskip("transformers")
    (tmp_path / "tutorial.py").write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mkdocs") is None and not (ROOT / ".venv/bin/mkdocs").is_file(), reason="needs the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "search" / "search_index.json").read_text()
    assert "Five minutes on a CPU" in index
