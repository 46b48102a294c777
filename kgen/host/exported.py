"""Programs in folders: what `kgen.export` writes and `kgen.load` runs, in any process, without tracing or a compiler.

A folder has `manifest.json` (what the code runs on, for people too), `program.pickle` (the host program, its constants and how
it is called), `weights.pt` and the machine code. Loading only reads it. `program.pickle` is a pickle: load only folders that
you trust.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kgen.build.bundle import Machine, load_bundle, missing_features, this_machine, write_bundle
from kgen.build.cpp import Unit
from kgen.capture import seeds as _seeds  # noqa: F401  an operator that programs call
from kgen.errors import DriverNotFound, ExportedElsewhere, LaunchFailed, NoExport, OperatorNotLoaded, WrongArguments
from kgen.host.launch import load_kernel
from kgen.host.native import load as load_program
from kgen.host.program import Extern, Program, each
from kgen.rendered.exported_call import Argument, Constant, ExportedCall, Result, Weight
from kgen.rendered.gpu_kernel import CompiledLaunches

__all__ = ["Contents", "LoadedProgram", "load", "write_folder"]

_MANIFEST, _PROGRAM, _WEIGHTS = "manifest.json", "program.pickle", "weights.pt"


@dataclass(frozen=True, slots=True)
class Contents:
    """What `program.pickle` has: `units` is how many libraries of kernels there are, `launches` are the GPU kernels."""

    program: Program
    constants: tuple[torch.Tensor, ...]
    call: ExportedCall
    units: int
    launches: CompiledLaunches


class LoadedProgram:
    """An exported module: called with the arguments that the module takes, it gives what the module gives.

    `weights` has the module's parameters, buffers and constant tensors by name; entries may be replaced by tensors of the same
    shape, dtype and strides. Buffers that the module changes are changed there. Results have no gradients."""

    def __init__(self, contents: Contents, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self._call = contents.call
        _check_operators(contents.program)
        bundle = load_bundle(folder, contents.units)
        made = contents.launches
        kernels = [load_kernel(kernel, made.devices, bundle.launcher) for kernel in made.kernels]
        self._run = load_program(contents.program, bundle.kernels, contents.constants, (), kernels, bundle.runtime)
        self._takes, self._gives = pytree.treespec_loads(contents.call.takes), pytree.treespec_loads(contents.call.gives)
        self._conditions = [compile(text, "condition", "eval") for text in contents.call.conditions]
        self._functions = _functions() if self._conditions else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises WrongArguments."""
        leaves = self._leaves(args, kwargs)
        self._check_constants(leaves)
        sizes: dict[str, int] = {}
        given = [self._tensor(one, leaves, sizes) for one in self._call.inputs]
        self._check_sizes(sizes)
        with torch.no_grad():
            found = self._run(list(given))
            results = [self._result(one, found, given, leaves) for one in self._call.results]
        return pytree.tree_unflatten(results, self._gives)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = self._takes.children()[1].context or []
        if sorted(kwargs) == sorted(names):
            kwargs = {name: kwargs[name] for name in names}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._takes:
            raise WrongArguments(problem=f"their structure is {structure}", expected=f"the structure {self._takes}")
        return leaves

    def _check_constants(self, leaves: Sequence[Any]) -> None:
        for one in self._call.constants:
            found = leaves[one.position]
            if type(found) is not type(one.value) or found != one.value:
                raise WrongArguments(
                    problem=f"{one.name} is {_short(found)}", expected=f"{one.value!r}, as when it was exported"
                )

    def _tensor(self, one: Weight | Argument, leaves: Sequence[Any], sizes: dict[str, int]) -> torch.Tensor:
        if isinstance(one, Weight):
            return self.weights[one.name]
        value = leaves[one.position]
        _check_tensor(one, value, sizes)
        return _laid_out(one, value.detach())

    def _result(
        self, one: Result | Constant, found: Sequence[Any], given: Sequence[torch.Tensor], leaves: Sequence[Any]
    ) -> Any:
        if isinstance(one, Constant):
            return one.value
        if one.base is None:
            return found[one.position]
        base = self._call.inputs[one.base]
        if one.is_argument and isinstance(base, Argument):
            return leaves[base.position]
        made = found[one.position]
        return given[one.base].as_strided(made.shape, made.stride(), made.storage_offset())

    def _check_sizes(self, sizes: dict[str, int]) -> None:
        for text, condition in zip(self._call.conditions, self._conditions, strict=True):
            if not eval(condition, self._functions, {"L": sizes}):
                meanings = dict(self._call.meanings)
                given = ", ".join(f"{meaning} is {sizes[name]}" for name, meaning in meanings.items())
                raise WrongArguments(problem=given, expected=_in_words(text, meanings))


def _check_operators(program: Program) -> None:
    """Raises OperatorNotLoaded for one that a library of the user's defines."""
    for item in each(program.code):
        if isinstance(item, Extern):
            namespace, _, name = item.op.partition("::")
            if not hasattr(getattr(torch.ops, namespace), name):
                raise OperatorNotLoaded(operator=item.op)


def _functions() -> dict[str, Any]:
    """What conditions call, by name."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # noqa: PLC0415  it loads sympy

    return dict(SYMPY_INTERP)


def _in_words(condition: str, meanings: Mapping[str, str]) -> str:
    for name, meaning in meanings.items():
        condition = condition.replace(f"L['{name}']", meaning)
    return condition


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def _check_tensor(one: Argument, value: Any, sizes: dict[str, int]) -> None:
    """Notes the dynamic sizes. Raises WrongArguments."""
    if not isinstance(value, torch.Tensor):
        raise WrongArguments(problem=f"{one.name} is {_short(value)}", expected="a tensor")
    found = value.dtype, value.device.type, value.layout
    if found != (one.dtype, one.device, torch.strided):
        expected = f"{one.dtype} on {one.device}"
        raise WrongArguments(problem=f"{one.name} is {value.dtype} on {value.device.type}, {value.layout}", expected=expected)
    fixed = len(one.sizes) == value.dim() and all(n in (None, k) for n, k in zip(one.sizes, value.shape, strict=True))
    if not fixed:
        shape = ", ".join("any" if n is None else str(n) for n in one.sizes)
        raise WrongArguments(problem=f"{one.name} has the shape {tuple(value.shape)}", expected=f"({shape})")
    for name, size in zip(one.symbols, value.shape, strict=True):
        if name is not None and sizes.setdefault(name, size) != size:
            raise WrongArguments(problem=f"{one.name} has the shape {tuple(value.shape)}", expected=f"{sizes[name]} for {size}")


def _laid_out(one: Argument, value: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides that the program was made for. Raises WrongArguments where a copy would not do."""
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if _is_ordered(value, one.order):
        return value
    if one.written:
        expected = f"the elements in memory in the order {one.order} of dimensions, as it is written"
        raise WrongArguments(problem=f"{one.name} has the strides {value.stride()}", expected=expected)
    return torch.empty_permuted(value.shape, one.order, dtype=value.dtype, device=value.device).copy_(value)


def _is_ordered(value: torch.Tensor, order: Sequence[int]) -> bool:
    expected = 1
    for dim in reversed(order):
        if value.stride(dim) != expected:
            return False
        expected *= max(value.size(dim), 1)
    return True


# ---- folders -----------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, contents: Contents, units: Sequence[Unit], weights: Mapping[str, torch.Tensor]) -> None:
    """Writes an exported program. The manifest comes last: without it, a folder is no program.

    Raises OSError, KernelBuildFailed and RuntimeBuildFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MANIFEST).unlink(missing_ok=True)
    launches, call = contents.launches, contents.call
    machine = write_bundle(units, folder, launches=bool(launches.kernels))
    machine = replace(machine, devices=launches.devices, arch=launches.arch)
    (folder / _PROGRAM).write_bytes(pickle.dumps(contents))
    torch.save(dict(weights), folder / _WEIGHTS)
    manifest = {"kgen": _fingerprint(), "machine": asdict(machine), **_for_people(call)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _for_people(call: ExportedCall) -> dict[str, Any]:
    tensors = (one for one in call.inputs if isinstance(one, Argument))
    meanings = dict(call.meanings)
    return {
        "arguments": {one.name: f"{one.dtype} {[n or 'any' for n in one.sizes]}" for one in tensors},
        "constants": {one.name: one.value for one in call.constants},
        "conditions": [_in_words(text, meanings) for text in call.conditions],
        "weights": [one.name for one in call.inputs if isinstance(one, Weight)],
    }


def load(folder: str | Path, weights: Mapping[str, torch.Tensor] | None = None) -> LoadedProgram:
    """The program that `kgen.export` wrote to `folder`. `weights` replace tensors of the module by name.

    Raises NoExport for what is no such folder, ExportedElsewhere where its machine code does not run, OperatorNotLoaded, and
    WrongArguments for weights that the program does not have or of another shape or dtype."""
    place = Path(folder)
    manifest = _manifest(place)
    _check_machine(manifest)
    try:
        contents = pickle.loads((place / _PROGRAM).read_bytes())
        kept = torch.load(place / _WEIGHTS, weights_only=True)
        return LoadedProgram(contents, place, _replaced(kept, weights or {}))
    except (DriverNotFound, LaunchFailed):
        raise
    except (OSError, ImportError, EOFError, pickle.UnpicklingError, RuntimeError) as cause:
        raise NoExport(folder=place, problem=f"{type(cause).__name__}: {cause}") from cause


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return {"kgen": str(found["kgen"]), "machine": dict(found["machine"])}
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise NoExport(folder=folder, problem=f"{_MANIFEST}: {cause}") from cause


def _check_machine(manifest: Mapping[str, Any]) -> None:
    lists = {name: tuple(manifest["machine"][name]) for name in ("features", "devices")}
    made = Machine(**{**manifest["machine"], **lists})
    here = this_machine()
    for what in ("torch", "python", "cpu"):
        if getattr(made, what) != getattr(here, what):
            raise ExportedElsewhere(what=what, made=getattr(made, what), here=getattr(here, what))
    missing = missing_features(made)
    if missing:
        raise ExportedElsewhere(what="the CPU's features", made=", ".join(missing), here="none of them")
    _check_gpus(made)
    if manifest["kgen"] != _fingerprint():
        raise ExportedElsewhere(what="kgen", made=manifest["kgen"], here=_fingerprint())


def _check_gpus(made: Machine) -> None:
    """Raises ExportedElsewhere where a GPU that the code runs on is another one here."""
    count = torch.cuda.device_count() if made.devices and torch.cuda.is_available() else 0
    for device in made.devices:
        here = torch.cuda.get_device_capability(device) if device < count else None
        if here != divmod(made.arch, 10):
            found = "none" if here is None else f"one of compute capability {here[0]}.{here[1]}"
            wanted = f"one of compute capability {made.arch // 10}.{made.arch % 10}"
            raise ExportedElsewhere(what=f"the GPU cuda:{device}", made=wanted, here=found)


def _replaced(kept: dict[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, value in weights.items():
        if name not in kept:
            raise WrongArguments(problem=f"there is no weight {name!r}", expected=f"some of {', '.join(kept) or 'none'}")
        _check_weight(name, kept[name], value)
        kept[name] = _like(kept[name]).copy_(value.detach())
    return kept


def _like(kept: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device)


def _check_weight(name: str, kept: torch.Tensor, value: torch.Tensor) -> None:
    if (value.shape, value.dtype) != (kept.shape, kept.dtype):
        problem = f"the weight {name} is {value.dtype} {tuple(value.shape)}"
        raise WrongArguments(problem=problem, expected=f"{kept.dtype} {tuple(kept.shape)}")


@functools.cache
def _fingerprint() -> str:
    """A hash of the sources that say what a host program means."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted((*(root / "host").iterdir(), *(root / "rendered").iterdir())):
        if path.suffix in (".py", ".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
