"""Options: where values come from, which are refused, and which enter cache keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import kgen
from kgen import config, errors
from kgen.backend import kgen_backend
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


def test_switches_with_more_values_take_booleans() -> None:
    """`layer_sharing` had no other values."""
    assert [config.from_call(None, {"layer_sharing": value}).layer_sharing for value in (True, False)] == ["on", "off"]
    with pytest.raises(errors.BadOptionValue, match="top_k"):
        config.from_call(None, {"top_k": True})


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


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (None, {"max_autotune": True}, {"mode": "max-autotune-no-cudagraphs"}),
        (None, {"max_autotune_gemm": True, "triton.cudagraphs": True}, {"mode": "max-autotune"}),
        ("reduce-overhead", {"max_autotune": True}, {"mode": "max-autotune"}),
        ("max-autotune", {"triton.cudagraphs": False}, {"mode": "max-autotune-no-cudagraphs"}),
        ("max-autotune", {"max_autotune": False}, {"mode": "reduce-overhead"}),
        (None, {"freezing": True}, {"freezing": True}),
        (None, {"emulate_precision_casts": True}, {"numerics": "eager"}),
        (None, {"deterministic": True}, {"numerics": "stable"}),
        (None, {"force_disable_caches": True}, {"cache": False}),
        (None, {"fx_graph_cache": False}, {"cache": False}),
        (None, {"shape_padding": False}, {"operand_padding": False}),
        (None, {"shape_padding": False, "operand_padding": True}, {"operand_padding": True}),
    ],
)
def test_inductors_names_mean_what_they_mean_there(mode: str | None, options: dict, expected: dict) -> None:
    made = from_call(mode, options)
    assert {name: getattr(made, name) for name in expected} == expected


def test_inductors_mode_is_counted_from_the_one_around() -> None:
    with override(mode="reduce-overhead"):
        assert from_call(None, {"max_autotune": True}).mode == "max-autotune"


@pytest.mark.parametrize("name", ["coordinate_descent_tuning", "triton.unique_kernel_names", "epilogue_fusion"])
def test_other_names_of_inductor_are_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(errors.UnknownOption, match=name) as raised:
        from_call(None, {name: True})
    assert "leave it out" in str(raised.value)


def test_a_switch_that_is_no_switch_is_refused() -> None:
    with pytest.raises(errors.BadOptionValue, match=r"max_autotune.*\n.*True or False"):
        from_call(None, {"max_autotune": 3})


def test_a_misspelled_name_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnknownOption, match="did you mean 'freezing'"):
        from_call(None, {"freezng": True})
    with pytest.raises(errors.UnknownOption, match="did you mean 'max_autotune'"):
        from_call(None, {"max_autotun": True})
    monkeypatch.setenv("KGEN_NUMERIC", "eager")
    with pytest.raises(errors.UnknownVariable, match="did you mean 'KGEN_NUMERICS'"):
        from_call()


def test_nothing_can_be_assigned() -> None:
    with pytest.raises(errors.OptionAssigned, match="override"):
        config.fusion = False  # type: ignore[attr-defined]
    with pytest.raises(errors.UnknownOption, match="did you mean 'fusion'"):
        config.fusoin = False  # type: ignore[attr-defined]
    assert not hasattr(config, "fusion")


def test_operators_that_do_not_exist_are_refused() -> None:
    def compiled(**options: object) -> None:
        torch.compile(torch.sin, backend=kgen_backend, options={"cache": False, **options})(torch.ones(2))

    compiled(fallback=["aten.mm", "aten.add.Tensor"])
    for wanted, context in ((kgen.require_fused, "require_fused"), (kgen.forbid_fused, "forbid_fused")):
        with (
            pytest.raises(BackendCompilerFailed, match=f"{context} names .* 'aten.rleu'"),
            wanted("aten.mm", "aten.rleu"),
        ):
            compiled()
    with pytest.raises(BackendCompilerFailed, match="did you mean 'aten") as caught:
        compiled(fallback="aten.admm")
    assert isinstance(caught.value.inner_exception, errors.UnknownOperator)


def test_the_list_of_options_has_all_of_them() -> None:
    listed = kgen.list_options()
    assert [one.name for one in listed] == [f.name for f in dataclasses.fields(Config)]
    by_name = {one.name: one for one in listed}
    assert by_name["numerics"].values == config.NUMERICS
    assert by_name["numerics"].variable == "KGEN_NUMERICS"
    assert "numerics='fast' fast|eager|stable" in str(by_name["numerics"])
    assert all(one.text for one in listed)


def test_the_typed_options_are_the_fields() -> None:
    assert config.Options.__annotations__.keys() == {f.name for f in dataclasses.fields(Config)}


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(errors.UnknownOption, match="no option 1"):
        from_call(None, {1: 2})  # type: ignore[dict-item]


def test_a_relative_folder_of_caches_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the XDG convention says: each working folder would get a cache of its own."""
    monkeypatch.delenv("KGEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert from_call().cache_path == tmp_path / ".cache" / "kgen"
