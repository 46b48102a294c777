"""Tasks of the operator suite that fail, and why. The list may only shrink: a test finds entries that no longer fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.opinfo.tasks import Task

# "operator kind" or "operator dtype kind" -> the reason
KNOWN: dict[str, str] = {}


def reason(task: Task) -> str:
    """Why the task fails; empty where it should not."""
    return KNOWN.get(str(task)) or KNOWN.get(f"{task.op} {task.kind}", "")
