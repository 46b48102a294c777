"""What a caller may choose: one frozen dataclass, one reading of the environment, and the fields that enter cache keys.

Values come, in rising precedence, from the defaults, the environment, `override(...)`, one call's mode and options, and
`insist(...)`.
A compilation gets its `Config` as an argument and never asks for the current one again.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack, get_args

from kgen import errors, option_names

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Numerics = Literal["fast", "eager", "stable"]
Isa = Literal["avx512", "avx2", "generic"]
Recompute = Literal["auto", "on", "off"]
Layouts = Literal["auto", "off"]
TopK = Literal["auto", "kernels", "library"]
Chunks = Literal["auto", "on", "off"]
Rolling = Literal["auto", "on", "off"]
Sharing = Literal["auto", "on", "off"]
Tuning = Literal["before", "background"]
MODES, NUMERICS, ISAS = get_args(Mode), get_args(Numerics), get_args(Isa)
RECOMPUTE, LAYOUTS, TOP_K, CHUNKS = get_args(Recompute), get_args(Layouts), get_args(TopK), get_args(Chunks)
ROLLING, SHARING = get_args(Rolling), get_args(Sharing)
TUNING = get_args(Tuning)


class Options(TypedDict, total=False):
    """The keys of `options=`, for type checkers: the fields of `Config`."""

    mode: Mode
    numerics: Numerics
    fallback: str | Sequence[str]
    fusion: bool
    inlining: bool
    loop_reordering: bool
    templates: bool
    template_packages: bool
    prologues: bool
    operand_padding: bool
    horizontal_fusion: bool
    loop_batching: bool
    loop_rolling: Rolling
    layer_sharing: Sharing
    measurements: bool
    early_launch: bool
    recompute_scores: Recompute
    chunked_logits: Chunks
    top_k: TopK
    layouts: Layouts
    freezing: bool
    verify: bool
    debug: str | os.PathLike[str] | None
    cache: bool
    cache_dir: str | os.PathLike[str] | None
    compiler: str | None
    isa: Isa | None
    tuning: Tuning
    tuning_seconds: float
    tuning_file: str | os.PathLike[str] | None
    gpu_interpreter: bool
    poison: bool
    profile_kernels: bool
    debug_info: bool
    strict: bool
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class Config:
    """Options of one compilation; every field is also a valid key of `options=`.

    `numerics`: fast keeps float32 inside a kernel for 16-bit types, and scales sums of products instead of their terms; eager
    rounds after each operation as eager does; stable also fixes the order of reductions so that results do not depend on
    tuning. `fallback` names operators (`aten.mm`, or `all`) that run in eager.

    Switches of optimisations, to see what each is worth. Without `fusion` every loop is a kernel of its own, and matmuls
    are library calls; without `inlining` every operator on tensors is a loop of its own, which is never computed again
    where it is read, but fuses with its consumers; without `loop_reordering` loops run in the order of the operator's
    dimensions; without `templates` matmuls are library calls; without `template_packages` no installed package's templates
    are imported; without `prologues` templates read their operands from memory; without `operand_padding` they read them
    where they are, however their rows lie; without `horizontal_fusion` nothing shares a kernel only because it reads the
    same data or is small: no matmuls with an operand in common, no loops that need nothing of each other, no combo kernels;
    without `loop_batching` iterations of an unrolled loop stay operators of their own (docs/loops.md); without
    `measurements` no tuning file is read; without `early_launch` a GPU's kernels are launched when the one before has
    ended.

    `loop_rolling` says whether unrolled loops whose iterations need each other's results become loops again, with one body
    that is compiled once (docs/loops.md): `auto` for those that would take long to compile; `on` for all of three iterations
    and more, which then run with a call an iteration.

    `layer_sharing` says whether equal layers are compiled once, as calls of one body (docs/loops.md): a deep model compiles
    sooner, but no kernel reaches from one layer into the next. `auto` does so on CPUs, for layers of so many floating-point
    operations that a step takes no longer; `on` for all of three layers and more.

    `recompute_scores` says whether backward graphs compute the weights of a softmax between two contractions again, from scores
    and one number of each row, instead of reading them from memory: `auto` where templates do so in one kernel.

    `chunked_logits` says whether backward graphs make the gradient of logits in runs of columns, so that neither logits nor
    their gradient are in memory as a whole, for one more matmul: `auto` where logits take 128 MiB and more.

    `layouts` says whether tensors around convolutions may have other strides than in eager, channels last where the library is
    faster so (`auto`); results of the graph never do.

    `top_k` says who finds the largest elements of rows (`topk` with k up to 64): `kernels` of kgen's own, the `library`, or by
    `auto` kernels on a CPU for k up to 16, on a GPU for k up to 8 of 1,024 rows or more and for rows of up to 2,048 elements,
    and the library else. It also says who sorts rows: `auto` has kernels do it for up to 16 elements, and on a GPU for
    up to 4,096.

    `freezing` promises that the module's tensors stay as they are, so that inference computes what depends on them alone once,
    and packs the weights of matmuls once (docs/runtime.md, Freezing).

    `debug` is a folder for graphs, verdicts and code. `cache` switches every cache on disk.
    `compiler` names the C++ compiler and `isa` the instruction set; by default both are found.

    `tuning` says when candidates are measured: `before` a graph runs, in the max-autotune modes alone; or in the `background`,
    in the default mode, while a graph runs with the default choices (docs/tuning.md). `tuning_seconds` is the time that one
    graph may spend measuring.

    `gpu_interpreter` makes GPU kernels for the CPU's tensors and
    runs them in Triton's interpreter: slow, for tests on machines without a GPU. `poison` fills memory with NaNs before kernels
    write it, so that what they forget shows: for tests, too.

    A profiler's timeline shows each call of a graph; with `profile_kernels` it shows kernels by name, too. `debug_info` gives
    C++ kernels the lines of their generated sources, which stay in the cache, for debuggers and perf.

    With `strict`, a kernel that cannot be built or loaded, or an error of kgen's own, raises; by default PyTorch's operators
    take over, with a warning (docs/failures.md). `compile_seconds` is the time that a compiler may take for one source; 0 is no
    limit.
    """

    mode: str = "default"
    numerics: str = "fast"
    fallback: tuple[str, ...] = ()
    fusion: bool = True
    inlining: bool = True
    loop_reordering: bool = True
    templates: bool = True
    template_packages: bool = True
    prologues: bool = True
    operand_padding: bool = True
    horizontal_fusion: bool = True
    loop_batching: bool = True
    loop_rolling: str = "auto"
    layer_sharing: str = "auto"
    measurements: bool = True
    early_launch: bool = True
    recompute_scores: str = "auto"
    chunked_logits: str = "auto"
    layouts: str = "auto"
    top_k: str = "auto"
    freezing: bool = False
    verify: bool = False
    debug: str | None = None
    cache: bool = True
    cache_dir: str | None = None
    compiler: str | None = None
    isa: str | None = None
    tuning: str = "before"
    tuning_seconds: float = 60.0
    tuning_file: str | None = None
    gpu_interpreter: bool = False
    poison: bool = False
    profile_kernels: bool = False
    debug_info: bool = False
    strict: bool = False
    compile_seconds: float = 600.0

    @property
    def autotune(self) -> bool:
        """Whether candidates may be measured."""
        return self.mode.startswith("max-autotune")

    @property
    def cudagraphs(self) -> bool:
        """Whether launches on a GPU are recorded and replayed as a CUDA graph."""
        return self.mode in ("reduce-overhead", "max-autotune")

    @property
    def cache_path(self) -> Path:
        """The cache folder: `cache_dir`, else the place that the XDG convention names."""
        return Path(self.cache_dir) if self.cache_dir else default_cache_path()


# The fields that change what is generated. Everything else may differ between two processes that share a cache.
CODE_FIELDS = (
    "mode", "numerics", "fallback", "fusion", "inlining", "loop_reordering", "templates", "prologues", "operand_padding",
    "horizontal_fusion", "loop_batching", "loop_rolling", "layer_sharing", "measurements", "early_launch",
    "recompute_scores", "layouts", "chunked_logits", "top_k", "freezing", "tuning_file", "template_packages", "compiler",
    "isa", "gpu_interpreter", "poison", "profile_kernels", "debug_info",
)  # fmt: skip

_FIELDS = {f.name: f for f in dataclasses.fields(Config)}
_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": MODES,
    "numerics": NUMERICS,
    "isa": ISAS,
    "recompute_scores": RECOMPUTE,
    "layouts": LAYOUTS,
    "top_k": TOP_K,
    "chunked_logits": CHUNKS,
    "loop_rolling": ROLLING,
    "layer_sharing": SHARING,
    "tuning": TUNING,
}
VARIABLES = {
    "KGEN_DEBUG": "debug",
    "KGEN_CACHE_DIR": "cache_dir",
    "KGEN_CXX": "compiler",
    "KGEN_ISA": "isa",
    "KGEN_NUMERICS": "numerics",
    "KGEN_FALLBACK": "fallback",
    "KGEN_TUNING_FILE": "tuning_file",
    "KGEN_STRICT": "strict",
}
# What kgen's own tests and benches read.
TEST_VARIABLES = ("KGEN_FUZZ_", "KGEN_OWN_LOOPS")
_overridden: ContextVar[Mapping[str, Any] | None] = ContextVar("kgen_config", default=None)
_insisted: ContextVar[Mapping[str, Any] | None] = ContextVar("kgen_config_insisted", default=None)


def current() -> Config:
    """The configuration outside of any call: environment, then `override`, then `insist`."""
    return dataclasses.replace(from_environment(), **{**(_overridden.get() or {}), **(_insisted.get() or {})})


@contextmanager
def override(**values: Unpack[Options]) -> Iterator[Config]:
    """Other defaults for the compilations started inside, in this thread. Names and values are checked like options."""
    checked = {**(_overridden.get() or {}), **_checked(values)}
    token = _overridden.set(checked)
    try:
        yield current()
    finally:
        _overridden.reset(token)


@contextmanager
def insist(**values: Any) -> Iterator[Config]:
    """Like `override`, but these win over a call's own mode and options, too: for commands that run somebody's script."""
    token = _insisted.set({**(_insisted.get() or {}), **_checked(values)})
    try:
        yield current()
    finally:
        _insisted.reset(token)


def choices(name: str) -> tuple[str, ...]:
    """The only values that an option may have; none where its type alone decides."""
    return _CHOICES.get(name, ())


def from_environment() -> Config:
    """The only place that reads environment variables for options."""
    found = {field: os.environ[variable] for variable, field in VARIABLES.items() if os.environ.get(variable)}
    return Config(**_checked({field: _from_text(field, text) for field, text in found.items()}))


# How the environment spells the values of a switch.
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _from_text(field: str, text: str) -> Any:
    """The value of an environment variable; a wrong one stays text, which the check refuses."""
    return _SWITCH.get(text.lower(), text) if _FIELDS[field].type == "bool" else text


def default_cache_path() -> Path:
    """Where the caches are if nobody says where."""
    return _user_cache() / "kgen"


def _user_cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")  # the convention has relative ones ignored
    return Path(named) if named.startswith("/") else Path.home() / ".cache"


def from_call(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
    """The configuration of one call. torch.compile refuses mode and options together, so options may carry "mode".

    Raises UnknownMode, UnknownOption or BadOptionValue, which list what is valid."""
    if options is not None and not isinstance(options, Mapping):
        raise errors.BadOptionValue(option="options", value=options, expected="give a dict of option names to values")
    given = dict(options or {})
    if mode is not None and given.setdefault("mode", mode) != mode:
        raise errors.BadOptionValue(option="mode", value=given["mode"], expected=f"give one mode: mode= says {mode!r}")
    _refuse_unknown_variables()
    found = dataclasses.replace(current(), **{**_checked(given), **(_insisted.get() or {})})
    _refuse_conflicts(found)
    return found


def _refuse_conflicts(config: Config) -> None:
    """Raises BadOptionValue."""
    if config.tuning == "background":
        wrong = [
            text for text, given in (
                ("the default mode", config.mode != "default"), ("freezing=False", config.freezing),
                ("measurements=True", not config.measurements), ("gpu_interpreter=False", config.gpu_interpreter),
            ) if given
        ]  # fmt: skip
        if wrong:
            raise errors.BadOptionValue(option="tuning", value="background", expected=f"it needs {', '.join(wrong)}")


def of_bodies(config: Config) -> Config:
    """The configuration of bodies of higher-order operators: only a whole call is recorded as a CUDA graph, or frozen."""
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    return dataclasses.replace(config, mode=modes.get(config.mode, config.mode), freezing=False)


def code_key(config: Config) -> tuple[Any, ...]:
    """The values that enter cache keys."""
    return tuple(getattr(config, name) for name in CODE_FIELDS)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    for name in values:
        if not isinstance(name, str):
            raise errors.UnknownOption(option=name, near="", valid=", ".join(sorted(_FIELDS)))
    ours = dict(values) if option_names.RENAMED.isdisjoint(values) else option_names.present(values)
    if not option_names.OF_INDUCTOR.isdisjoint(ours):
        overridden = (_overridden.get() or {}).get("mode", "default")
        ours = option_names.of_inductor(ours, overridden)
    return {name: _checked_value(name, value) for name, value in ours.items()}


def _refuse_unknown_variables() -> None:
    """Raises UnknownVariable: a misspelled variable would be overlooked."""
    for name in os.environ:
        if name.startswith("KGEN_") and name not in VARIABLES and not name.startswith(TEST_VARIABLES):
            near = option_names.near(name, VARIABLES)
            raise errors.UnknownVariable(variable=name, near=near, valid=", ".join(sorted(VARIABLES)))


def _checked_value(name: str, value: Any) -> Any:
    if name in option_names.OF_INDUCTOR:  # a switch would have kgen's name by now
        raise errors.BadOptionValue(option=name, value=value, expected="give True or False")
    if name not in _FIELDS:
        near = option_names.instead(name, (*_FIELDS, *option_names.OF_INDUCTOR))
        raise errors.UnknownOption(option=name, near=near, valid=", ".join(sorted(_FIELDS)))
    if name == "mode" and value not in MODES:
        raise errors.UnknownMode(mode=value, near=option_names.near(str(value), MODES), valid=", ".join(MODES))
    if name in _CHOICES:
        if isinstance(value, bool) and {"on", "off"} <= set(_CHOICES[name]):
            value = "on" if value else "off"
        if value not in _CHOICES[name]:
            raise errors.BadOptionValue(option=name, value=value, expected="use one of: " + ", ".join(_CHOICES[name]))
        return value
    kind = str(_FIELDS[name].type)
    expected, convert = _KINDS[kind]
    converted = convert(value)
    if converted is _REFUSED:
        raise errors.BadOptionValue(option=name, value=value, expected=f"give {expected}")
    return converted


_REFUSED = object()


def _flag(value: Any) -> Any:
    return value if isinstance(value, bool) else _REFUSED


def _names(value: Any) -> Any:
    """Operator names, sorted: two spellings of one set must give one cache key."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset) or not all(isinstance(p, str) for p in parts):
        return _REFUSED
    return tuple(sorted({p.strip().removeprefix("torch.ops.") for p in parts if p.strip()}))


def _path(value: Any) -> Any:
    return str(value) if isinstance(value, str | os.PathLike) else None if value is None else _REFUSED


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else _REFUSED


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("True or False", _flag),
    "tuple[str, ...]": ("operator names such as 'aten.mm', as a list or separated by commas", _names),
    "str | None": ("a path, or None", _path),
    "float": ("a number of seconds, zero or more", _seconds),
}


class _Module(ModuleType):
    """This module, of which no option can be assigned: nothing would read it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FIELDS:
            raise errors.OptionAssigned(option=name)
        if name not in vars(self) and not name.startswith("_"):
            raise errors.UnknownOption(option=name, near=option_names.near(name, _FIELDS), valid=", ".join(sorted(_FIELDS)))
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
