"""Names that options are known by elsewhere: Inductor's, where one of kgen's means the same, and kgen's own old ones."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["instead", "near", "of_inductor", "present"]

# Old names of options. They work for one release.
_RENAMED = {"operand_copies": "operand_padding", "siblings": "horizontal_fusion"}
# Inductor's switches: the option of kgen that says the same, with its values for True and False. None: it stays as it is.
_SWITCHES: dict[str, tuple[str, Any, Any]] = {
    "emulate_precision_casts": ("numerics", "eager", None),
    "deterministic": ("numerics", "stable", None),
    "force_disable_caches": ("cache", False, None),
    "fx_graph_cache": ("cache", None, False),
    "shape_padding": ("operand_padding", True, False),
    "prologue_fusion": ("prologues", True, False),
}
# Those that choose a mode: whether candidates are measured, and whether CUDA graphs are recorded.
_MEASURES = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_GRAPHS = "triton.cudagraphs"
_MODES = {
    (False, False): "default", (False, True): "reduce-overhead",
    (True, False): "max-autotune-no-cudagraphs", (True, True): "max-autotune",
}  # fmt: skip
# Those that nothing of kgen's is the same as, and what to do instead.
_INSTEAD = {
    "epilogue_fusion": "kgen always fuses what follows a matmul, and 'fusion' switches all of fusion; leave it out",
    "coordinate_descent_tuning": "mode='max-autotune' measures loops and tiles of every kernel; leave it out",
    "combo_kernels": "independent kernels share a launch unless 'horizontal_fusion' is False; leave it out",
    "cpp_wrapper": "a graph is one native call in any case; leave it out",
    "triton.cudagraph_trees": "mode='reduce-overhead' records CUDA graphs; leave it out",
    "triton.unique_kernel_names": "kernels are called by their operators in any case; leave it out",
    "trace.enabled": "give 'debug' a folder, or run `kgen explain script.py`",
    "trace.graph_diagram": "`kgen explain script.py --html out.html` draws the graph",
    "fallback_random": "random numbers are kgen's own, equal on CPUs and GPUs; leave it out",
}
RENAMED = frozenset(_RENAMED)
OF_INDUCTOR = frozenset({*_SWITCHES, *_MEASURES, _GRAPHS})


def near(name: str, valid: Iterable[str]) -> str:
    """``did you mean 'fusion'? `` where a valid name is like this one; nothing otherwise."""
    found = difflib.get_close_matches(name, [*valid], n=1)
    return f"did you mean {found[0]!r}? " if found else ""


def instead(name: str, valid: Iterable[str]) -> str:
    """What to do with an unknown option: of Inductor's, what kgen has in its place; else the name that is like it."""
    return f"{_INSTEAD[name]}. Otherwise " if name in _INSTEAD else near(name, valid)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by present names, with a warning for each old one. Where both are given the present one counts."""
    old = {name: values[name] for name in values if name in _RENAMED}
    for name in old:
        text = f"kgen: option {name!r} is now {_RENAMED[name]!r}; the old name works for one release"
        warnings.warn(text, FutureWarning, stacklevel=6)
    kept = {name: value for name, value in values.items() if name not in old}
    return {_RENAMED[name]: value for name, value in old.items()} | kept


def of_inductor(values: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The values with kgen's names in place of Inductor's; a value that is no switch stays, and is refused by its name. `mode`
    is the one that holds otherwise. Of an option that is given by both names, kgen's own counts."""
    switches = {name: value for name, value in values.items() if name in OF_INDUCTOR and isinstance(value, bool)}
    found = {name: value for name, value in values.items() if name not in switches}
    for name, on in switches.items():
        if name in _SWITCHES:
            option, true, false = _SWITCHES[name]
            value = true if on else false
            if value is not None:
                found.setdefault(option, value)
    if any(name in switches for name in (*_MEASURES, _GRAPHS)):
        found["mode"] = _mode(switches, found.get("mode", mode))
    return found


def _mode(switches: Mapping[str, bool], mode: str) -> str:
    """The mode, with what the switches say otherwise."""
    if mode not in _MODES.values():
        return mode  # which is an error of its own
    measures, graphs = next(key for key, name in _MODES.items() if name == mode)
    given = [switches[name] for name in _MEASURES if name in switches]
    return _MODES[any(given) if given else measures, switches.get(_GRAPHS, graphs)]
