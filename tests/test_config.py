"""Options: where values come from, which are refused, and which enter cache keys."""

from __future__ import annotations

import dataclasses

import pytest

from kgen import config, errors
from kgen.config import Config, code_key, current, from_call, override

pytestmark = pytest.mark.none


@pytest.mark.parametrize("mode", config.MODES)
def test_every_mode_is_accepted_both_ways(mode: str) -> None:
    assert from_call(mode).mode == mode
    assert from_call(None, {"mode": mode}).mode == mode


def test_mode_and_options_together() -> None:
    made = from_call("max-autotune", {"fusion": False})
    assert (made.mode, made.fusion, made.autotune, made.cudagraphs) == ("max-autotune", False, True, True)
    with pytest.raises(errors.BadOptionValue):
        from_call("max-autotune", {"mode": "default"})


def test_unknown_mode_lists_the_valid_ones() -> None:
    with pytest.raises(errors.UnknownMode, match="max-autotune-no-cudagraphs"):
        from_call("fastest")


def test_unknown_option_lists_the_valid_ones() -> None:
    with pytest.raises(errors.UnknownOption, match="loop_reordering"):
        from_call(None, {"fuse": True})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("fusion", 1),
        ("numerics", "exact"),
        ("fallback", 3),
        ("fallback", [1]),
        ("tuning_seconds", -1),
        ("tuning_seconds", True),
        ("debug", 7),
        ("isa", "sse"),
    ],
)
def test_bad_values_are_refused_with_what_is_expected(option: str, value: object) -> None:
    with pytest.raises(errors.BadOptionValue, match=option):
        from_call(None, {option: value})


def test_options_must_be_a_mapping() -> None:
    with pytest.raises(errors.BadOptionValue):
        from_call(None, ["fusion"])  # type: ignore[arg-type]


def test_fallback_is_a_set_of_names() -> None:
    made = from_call(None, {"fallback": ["torch.ops.aten.mm", "aten.add"]})
    assert made.fallback == from_call(None, {"fallback": "aten.add, aten.mm"}).fallback == ("aten.add", "aten.mm")


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_NUMERICS", "eager")
    assert current().numerics == "eager"
    with override(numerics="stable", fusion=False) as inside:
        assert inside == current()
        assert from_call().numerics == "stable"
        assert from_call(None, {"numerics": "fast"}).numerics == "fast"
        with override(inlining=False):
            assert (current().fusion, current().inlining) == (False, False)
    assert (current().numerics, current().fusion) == ("eager", True)


def test_insist_wins_over_the_call() -> None:
    with override(mode="max-autotune"), config.insist(mode="default", cache=False) as inside:
        assert inside == current()
        assert (from_call("reduce-overhead").mode, from_call(None, {"cache": True}).cache) == ("default", False)
        assert not from_call("max-autotune", {"fusion": False}).fusion
        with config.insist(fusion=True), override(mode="max-autotune", fusion=False):
            assert from_call(None, {"fusion": False}).fusion
            assert from_call().mode == current().mode == "default"
        with pytest.raises(errors.UnknownMode):
            from_call("fastest")
    assert from_call("reduce-overhead").mode == "reduce-overhead"
    with pytest.raises(errors.UnknownMode), config.insist(mode="fastest"):
        pass


def test_wrong_environment_and_override_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnknownOption), override(fuse=True):
        pass
    monkeypatch.setenv("KGEN_NUMERICS", "exact")
    with pytest.raises(errors.BadOptionValue):
        current()


def test_cache_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KGEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(current().cache_path) == "/somewhere/kgen"
    monkeypatch.setenv("KGEN_CACHE_DIR", "/elsewhere")
    assert str(current().cache_path) == "/elsewhere"


def test_code_fields_decide_the_key() -> None:
    plain = Config()
    fields = {f.name for f in dataclasses.fields(Config)}
    assert set(config.CODE_FIELDS) <= fields
    assert code_key(plain) == code_key(dataclasses.replace(plain, debug="x", cache_dir="y", tuning_seconds=1.0))
    for change in ({"numerics": "eager"}, {"fusion": False}, {"fallback": ("aten.mm",)}, {"mode": "max-autotune"}):
        assert code_key(plain) != code_key(dataclasses.replace(plain, **change))
