"""docs/scheduler.md has a section for each transform, in the order of the table, and what it names is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kgen.scheduler.protocol import Transform
from kgen.scheduler.transforms.table import TRANSFORMS
from kgen.verdict import Reason

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "scheduler.md").read_text()
NAMES = [type(one).__name__ for one in TRANSFORMS]


def test_each_transform_has_a_section_in_the_order_of_the_table() -> None:
    assert [title for title in re.findall(r"^## (\w+)$", TEXT, re.MULTILINE) if title in NAMES] == NAMES


def test_sections_say_what_a_reader_needs() -> None:
    for name in NAMES:
        section = TEXT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for part in ("*File*", "    before", "    after", "**Legality.**", "**Profitability.**", "**Verdicts.**"):
            assert part in section, f"{name} has no {part}"


def test_the_table_of_the_protocol_has_every_method() -> None:
    section = TEXT.partition("\n| method |")[2].partition("\n\n")[0]
    methods = [name for name, _ in inspect.getmembers(Transform, inspect.isfunction) if not name.startswith("_")]
    assert sorted(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) == sorted(methods)


def test_verdicts_are_reasons() -> None:
    named = {name for line in re.findall(r"`([A-Z][A-Z_]+)`", TEXT) for name in (line,)} - {"CHANGES"}
    assert named <= {reason.name for reason in Reason}
