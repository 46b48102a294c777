"""docs/ir.md is what the IR's docstrings say."""

from __future__ import annotations

from tools import ir_docs


def test_the_document_is_up_to_date() -> None:
    assert ir_docs.DOCUMENT.read_text() == ir_docs.text(), "run python -m tools.ir_docs"


def test_it_has_the_nodes_and_the_operations() -> None:
    text = ir_docs.text()
    assert "### Contraction" in text
    assert "**Semantics**" in text
    assert "| `maximum` | 2 |" in text
    assert "``" not in text
