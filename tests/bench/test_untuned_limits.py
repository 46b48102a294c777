"""Which blocks the bench of untuned blocks has, and what becomes of one that takes too long."""

from __future__ import annotations

from bench.untuned.__main__ import LISTS, command_line, models, names_of_rows, rows


def _names(*options: str) -> list[str]:
    return names_of_rows(command_line().parse_args(options))


def test_a_cpu_has_models_alone_unless_blocks_are_named() -> None:
    assert _names("--device", "cpu") == list(models("cpu"))
    assert _names("--device", "cpu", "--list", "third") == [b.name for b in LISTS["third"]]
    assert _names("--device", "cpu", "--blocks") == _names("--blocks")


def test_shards_share_the_rows() -> None:
    whole = _names("--device", "cpu", "--list", "second")
    assert whole[1::3] == _names("--device", "cpu", "--list", "second", "--shard", "2/3")


def test_a_row_past_its_limit_says_so() -> None:
    arguments = ["--device", "cpu", "--limit", "0.01"]
    [row] = rows(["dice and bce 16x500"], command_line().parse_args(arguments), arguments)
    assert row["failed"] == {"process": "no result within 0.01 s: give more with --limit"}
    assert not row["seconds"]
