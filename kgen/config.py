"""What a caller may choose: one frozen dataclass, one reading of the environment, and the fields that enter cache keys.

Values come, in rising precedence, from the defaults, the environment, `override(...)`, one call's mode and options, and
`insist(...)`.
A compilation gets its `Config` as an argument and never asks for the current one again.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen import errors

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
NUMERICS = ("fast", "eager", "stable")
ISAS = ("avx512", "avx2", "generic")
RECOMPUTE = ("auto", "on", "off")
LAYOUTS = ("auto", "off")
CHUNKS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class Config:
    """Options of one compilation; every field is also a valid key of `options=`.

    `numerics`: fast keeps float32 inside a kernel for 16-bit types, and scales sums of products instead of their terms; eager
    rounds after each operation as eager does; stable also fixes the order of reductions so that results do not depend on
    tuning. `fallback` names operators (`aten.mm`, or `all`) that run in eager.

    Switches of optimisations, to see what each is worth. Without `fusion` every loop is a kernel of its own, and matmuls are
    library calls; without `inlining` every operator on tensors is a loop of its own, which is never computed again where it is
    read, but fuses with its consumers; without `loop_reordering` loops run in the order of the operator's dimensions;
    without `templates` matmuls are library calls; without `prologues` templates read their operands from memory; without
    `operand_padding` they read them where they are, however their rows lie; without `horizontal_fusion` nothing shares a kernel
    only because it reads the same data or is small: no matmuls with an operand in common, no loops that need nothing of each
    other, no combo kernels; without `loop_batching` iterations of an unrolled loop stay operators of their own (docs/loops.md);
    without `measurements` no tuning file is read; without `early_launch` a GPU's kernels are launched when the one before has
    ended.

    `recompute_scores` says whether backward graphs compute the weights of a softmax between two contractions again, from scores
    and one number of each row, instead of reading them from memory: `auto` where templates do so in one kernel.

    `chunked_logits` says whether backward graphs make the gradient of logits in runs of columns, so that neither logits nor
    their gradient are in memory as a whole, for one more matmul: `auto` where logits take 128 MiB and more.

    `layouts` says whether tensors around convolutions may have other strides than in eager, channels last where the library is
    faster so (`auto`); results of the graph never do.

    `freezing` promises that the module's tensors stay as they are, so that inference computes what depends on them alone once,
    and packs the weights of matmuls once (docs/runtime.md, Freezing).

    `debug` is a folder for graphs, verdicts and code. `cache` switches every cache on disk.
    `compiler` names the C++ compiler and `isa` the instruction set; by default both are found. `tuning_seconds` is the time
    that one graph may spend measuring in the max-autotune modes. `gpu_interpreter` makes GPU kernels for the CPU's tensors and
    runs them in Triton's interpreter: slow, for tests on machines without a GPU. `poison` fills memory with NaNs before kernels
    write it, so that what they forget shows: for tests, too.

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
    prologues: bool = True
    operand_padding: bool = True
    horizontal_fusion: bool = True
    loop_batching: bool = True
    measurements: bool = True
    early_launch: bool = True
    recompute_scores: str = "auto"
    chunked_logits: str = "auto"
    layouts: str = "auto"
    freezing: bool = False
    verify: bool = False
    debug: str | None = None
    cache: bool = True
    cache_dir: str | None = None
    compiler: str | None = None
    isa: str | None = None
    tuning_seconds: float = 60.0
    tuning_file: str | None = None
    gpu_interpreter: bool = False
    poison: bool = False
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
        return Path(self.cache_dir) if self.cache_dir else _user_cache() / "kgen"


# The fields that change what is generated. Everything else may differ between two processes that share a cache.
CODE_FIELDS = (
    "mode", "numerics", "fallback", "fusion", "inlining", "loop_reordering", "templates", "prologues", "operand_padding",
    "horizontal_fusion", "loop_batching", "measurements", "early_launch", "recompute_scores", "chunked_logits", "layouts",
    "freezing", "tuning_file",
    "compiler", "isa", "gpu_interpreter", "poison",
)  # fmt: skip

_FIELDS = {f.name: f for f in dataclasses.fields(Config)}
_CHOICES = {
    "mode": MODES, "numerics": NUMERICS, "isa": ISAS, "recompute_scores": RECOMPUTE, "chunked_logits": CHUNKS,
    "layouts": LAYOUTS,
}  # fmt: skip
_ENVIRONMENT = {
    "KGEN_DEBUG": "debug",
    "KGEN_CACHE_DIR": "cache_dir",
    "KGEN_CXX": "compiler",
    "KGEN_ISA": "isa",
    "KGEN_NUMERICS": "numerics",
    "KGEN_FALLBACK": "fallback",
    "KGEN_TUNING_FILE": "tuning_file",
    "KGEN_STRICT": "strict",
}
_overridden: ContextVar[Mapping[str, Any] | None] = ContextVar("kgen_config", default=None)
_insisted: ContextVar[Mapping[str, Any] | None] = ContextVar("kgen_config_insisted", default=None)


def current() -> Config:
    """The configuration outside of any call: environment, then `override`, then `insist`."""
    return dataclasses.replace(from_environment(), **{**(_overridden.get() or {}), **(_insisted.get() or {})})


@contextmanager
def override(**values: Any) -> Iterator[Config]:
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


def from_environment() -> Config:
    """The only place that reads environment variables for options."""
    found = {field: os.environ[variable] for variable, field in _ENVIRONMENT.items() if os.environ.get(variable)}
    return Config(**_checked({field: _from_text(field, text) for field, text in found.items()}))


# How the environment spells the values of a switch.
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _from_text(field: str, text: str) -> Any:
    """The value of an environment variable; a wrong one stays text, which the check refuses."""
    return _SWITCH.get(text.lower(), text) if _FIELDS[field].type == "bool" else text


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def from_call(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Config:
    """The configuration of one call. torch.compile refuses mode and options together, so options may carry "mode".

    Raises UnknownMode, UnknownOption or BadOptionValue, which list what is valid."""
    if options is not None and not isinstance(options, Mapping):
        raise errors.BadOptionValue(option="options", value=options, expected="give a dict of option names to values")
    given = dict(options or {})
    if mode is not None and given.setdefault("mode", mode) != mode:
        raise errors.BadOptionValue(option="mode", value=given["mode"], expected=f"give one mode: mode= says {mode!r}")
    return dataclasses.replace(current(), **{**_checked(given), **(_insisted.get() or {})})


def of_bodies(config: Config) -> Config:
    """The configuration of bodies of higher-order operators: only a whole call is recorded as a CUDA graph, or frozen."""
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    return dataclasses.replace(config, mode=modes.get(config.mode, config.mode), freezing=False)


def code_key(config: Config) -> tuple[Any, ...]:
    """The values that enter cache keys."""
    return tuple(getattr(config, name) for name in CODE_FIELDS)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _checked_value(name, value) for name, value in _renamed(values).items()}


# Old names of options. They work for one release.
_RENAMED = {"operand_copies": "operand_padding", "siblings": "horizontal_fusion"}


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by present names, with a warning for each old one. Where both are given the present one counts."""
    old = {name: values[name] for name in values if name in _RENAMED}
    for name in old:
        text = f"kgen: option {name!r} is now {_RENAMED[name]!r}; the old name works for one release"
        warnings.warn(text, FutureWarning, stacklevel=5)
    present = {name: value for name, value in values.items() if name not in old}
    return {_RENAMED[name]: value for name, value in old.items()} | present


def _checked_value(name: str, value: Any) -> Any:
    if name not in _FIELDS:
        raise errors.UnknownOption(option=name, valid=", ".join(sorted(_FIELDS)))
    if name == "mode" and value not in MODES:
        raise errors.UnknownMode(mode=value, valid=", ".join(MODES))
    if name in _CHOICES:
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
