"""Old names of options and of authors' methods: they work for one release, or say what they are called now."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from kgen import errors
from kgen.config import from_call, override
from tests import template_author

pytestmark = pytest.mark.none


@pytest.mark.parametrize(("old", "new"), [("operand_copies", "operand_padding"), ("siblings", "horizontal_fusion")])
def test_old_options_work_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"option '{old}' is now '{new}'"):
        assert not getattr(from_call(None, {old: False}), new)
    with pytest.warns(FutureWarning), override(**{old: False}):
        assert not getattr(from_call(), new)


def test_the_present_name_counts() -> None:
    with pytest.warns(FutureWarning):
        assert from_call(None, {"siblings": False, "horizontal_fusion": True}).horizontal_fusion
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not from_call(None, {"horizontal_fusion": False}).horizontal_fusion


def test_old_methods_say_what_they_are_called_now(tmp_path: Path) -> None:
    methods = "    def sides(self, problem, config):\n        return {}\n"
    path = template_author.write(tmp_path, "old_names", methods=methods)
    with pytest.raises(errors.BadTemplate, match="was epilogue_subtile meant"):
        template_author.load(path)
