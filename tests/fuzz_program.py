"""Random programs of the program fuzzer: Python source, grown statement by statement against real tensors in eager.

A *base* is a tensor that owns its storage. The inputs are the bases or views of them, so that inputs may alias. In a program
that raises on purpose, the last statement is the one that raises.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from shrinking import smallest

MAX_NUMEL = 2500
# Elements that loops on several threads share, in one program of twelve.
LARGE_NUMEL = 60_000
# Finite in every float type, with room to multiply two.
MAX_VALUE = 200.0
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 20, 33)
LARGE_SIZES = (1, 2, 3, 8, 16, 31, 64, 100, 129, 256, 517)
FLOATS = {"f32": 10, "bf16": 4, "f16": 3, "f64": 3}
INTEGERS = {"i64": 6, "i32": 3, "i8": 2, "u8": 2, "i16": 1}
DTYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "i8": torch.int8,
    "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8, "boolean": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PRELUDE = """\
import torch
import torch.nn.functional as F

D = "{device}"
""" + "".join(f"{name} = {dtype}\n" for name, dtype in DTYPES.items()) + '''

def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randint(seed, low, high, *shape):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def sprinkled(seed, x, *values):
    """`x` with some elements replaced by `values`."""
    hits = torch.where(randint(seed, 0, 4, *x.shape) == 0, randint(seed + 1, 0, len(values), *x.shape), len(values))
    for k, value in enumerate(values):
        x = x.masked_fill(hits == k, value)
    return x

'''  # fmt: skip


@dataclass(frozen=True)
class Program:
    """`bases` and `inputs` are (name, expression); `outputs` are names. `raises`: eager raises this class.

    Expressions may name the length `ROWS`, which is `rows`. Where sizes are `dynamic`, or inputs are `marked` so, the second
    call is of another length. `converted`: kgen.control_flow compiles it."""

    seed: int
    bases: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: bool = False
    dynamic: bool = False
    raises: str = ""
    rows: int = 0
    marked: tuple[str, ...] = ()
    converted: bool = False

    def source(self, device: str = "cpu") -> str:
        """A module with `make()`, which returns fresh bases, `views(bases)`, which returns the inputs, and `f(inputs)`."""
        bases, inputs = ", ".join(n for n, _ in self.bases), ", ".join(n for n, _ in self.inputs)
        made = "".join(f"    {name} = {expr}\n" for name, expr in self.bases)
        seen = "".join(f"    {name} = {expr}\n" for name, expr in self.inputs)
        seen += "".join(f"    torch._dynamo.mark_dynamic({name}, 0)\n" for name in self.marked)
        body = "".join(f"    {statement}\n" for line in self.lines for statement in line.split("\n"))
        return (
            f"{PRELUDE.format(device=device)}{f'ROWS = {self.rows}{chr(10)}' if self.rows else ''}\n"
            f"def make():\n{made}    return [{bases}]\n\n\n"
            f"def views({bases}):\n{seen}    return [{inputs}]\n\n\n"
            f"def f({inputs}):\n{body}    return [{', '.join(self.outputs)}]\n"
        )

    def load(self, device: str = "cpu", widened: bool = False) -> dict[str, Any]:
        """The module's names. `widened`: every float type is float64."""
        space: dict[str, Any] = {}
        source, file = self.source(device), f"<program {self.seed}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # conversion reads it
        exec(compile(source, file, "exec"), space)
        if widened:
            space |= dict.fromkeys(FLOATS, torch.float64)
        return space

    def smaller(self) -> Iterator[Program]:
        """Programs with one part less; many of them do not run."""
        yield from self._fewer_outputs()
        for k in reversed(range(len(self.lines))):
            yield from (one for one in (self._without(k), *self._without_a_block(k)) if one.ends())
        yield from self._fewer_inputs()
        yield from self._simpler_inputs()
        yield from self._smaller_sizes()
        if self.dynamic or self.marked:
            yield replace(self, dynamic=False, marked=())
        if self.converted:
            yield replace(self, converted=False)

    def ends(self) -> bool:
        """Whether what a `while` counts is still counted."""
        counted = [line.strip() in ("i += 1", "i = i + 1") for line in self.lines]
        return any(counted) or not any(line.strip().startswith("while ") for line in self.lines)

    def longer(self) -> Program:
        """The program with another length, where it may have one."""
        return replace(self, rows=self.rows + 2) if self.rows and (self.dynamic or self.marked) else self

    def _without_a_block(self, k: int) -> Iterator[Program]:
        """Without a loop or a branch, and without what is inside of it; or with what is inside of it done at all times."""
        line = self.lines[k]
        inside = 0
        while k + 1 + inside < len(self.lines) and _indent(self.lines[k + 1 + inside]) > _indent(line):
            inside += 1
        if inside:
            before, block, behind = self.lines[:k], self.lines[k + 1 : k + 1 + inside], self.lines[k + 1 + inside :]
            yield replace(self, lines=before + behind)
            yield replace(self, lines=(*before, *(one[4:] for one in block), *behind))

    def _fewer_outputs(self) -> Iterator[Program]:
        if len(self.outputs) > 1:
            yield from (replace(self, outputs=(name,)) for name in self.outputs)
            yield from (replace(self, outputs=tuple(o for o in self.outputs if o != name)) for name in self.outputs)

    def _without(self, k: int) -> Program:
        """Results of the statement that is left out are replaced by what it reads, so that later ones may still run."""
        line, rest = self.lines[k], (*self.lines[:k], *self.lines[k + 1 :])
        name, _, value = line.split("\n")[0].partition(" = ")
        read = re.findall(r"\b[vx]\d+\b", value)
        outputs = tuple(o for o in self.outputs if o != name)
        if not read or not name.isidentifier():
            return replace(self, lines=rest, outputs=outputs or self.outputs)
        lines = tuple(re.sub(rf"\b{name}\b", read[0], later) for later in rest)
        known = outputs or (read[0],)
        return replace(self, lines=lines, outputs=tuple(dict.fromkeys(known)))

    def _fewer_inputs(self) -> Iterator[Program]:
        text = " ".join((*self.lines, *self.outputs))
        inputs = tuple(i for i in self.inputs if i[0] in self.marked or re.search(rf"\b{i[0]}\b", text))
        bases = tuple(b for b in self.bases if any(re.search(rf"\b{b[0]}\b", expr) for _, expr in inputs))
        if inputs and (inputs, bases) != (self.inputs, self.bases):
            yield replace(self, inputs=inputs, bases=bases)

    def _simpler_inputs(self) -> Iterator[Program]:
        for k, (name, expr) in enumerate(self.bases):
            inner = re.fullmatch(r"sprinkled\(\d+, (.*?\)(?:\.to\(\w+\))?), [^()]*\)(\.to\(.*\))?", expr)
            if inner:
                changed = (name, inner[1] + (inner[2] or ""))
                yield replace(self, bases=(*self.bases[:k], changed, *self.bases[k + 1 :]))

    def _smaller_sizes(self) -> Iterator[Program]:
        """One number, wherever it stands, made smaller."""
        parts = (*(expr for _, expr in (*self.bases, *self.inputs)), *self.lines)
        numbers = sorted({int(n) for part in parts for n in _SIZE.findall(part) if 1 < int(n) < 1000}, reverse=True)
        for old in numbers:
            for new in sorted({1, 2, old // 2, old - 1} - {0, old}):
                yield self._replaced(old, new)

    def _replaced(self, old: int, new: int) -> Program:
        def change(text: str) -> str:
            return _SIZE.sub(lambda m: str(new) if int(m[0]) == old else m[0], text)

        return replace(
            self,
            bases=tuple((n, change(e)) for n, e in self.bases),
            inputs=tuple((n, change(e)) for n, e in self.inputs),
            lines=tuple(map(change, self.lines)),
        )

    def size(self) -> tuple[int, ...]:
        """What shrinking makes less, the most important first."""
        text = self.source()
        numbers = sum(int(n) for n in _SIZE.findall(text))
        parts = len(self.bases) + len(self.inputs)
        ways = self.dynamic + bool(self.marked) + self.converted
        return len(self.lines), len(self.outputs), parts, ways, text.count("sprinkled"), numbers, len(text)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Program:
        pairs = {name: tuple((a, b) for a, b in data[name]) for name in ("bases", "inputs")}
        names = {name: tuple(data[name]) for name in ("lines", "outputs", "marked")}
        return Program(**{**data, **pairs, **names})


# Whole numbers that are no part of a name or of a number with a point.
_SIZE = re.compile(r"(?<![\w.])\d+(?![\w.])")


def shrunk(program: Program, fails: Callable[[Program], bool], attempts: int = 150) -> Program:
    """A program in which no single part can be left out without losing the failure."""
    return smallest(program, fails, Program.size, runs, attempts)


def runs(program: Program) -> bool:
    """Whether eager does what the program says of itself: it runs, or raises the class."""
    try:
        run_eagerly(program)
    except Exception as error:
        return type(error).__name__ == program.raises
    return not program.raises


def run_eagerly(program: Program) -> Any:
    space = program.load()
    bases = space["make"]()
    if not program.gradients:
        with torch.no_grad():
            return space["f"](*space["views"](*bases))
    return differentiated(space["f"], space["views"], bases)[0]


def differentiated(
    f: Callable[..., Any], views: Callable[..., Any], bases: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Results, inputs as the call left them, and gradients of a weighted sum of both by the bases."""
    leaves = [b.detach().clone().requires_grad_(b.is_floating_point()) for b in bases]
    with torch.enable_grad():
        inputs = views(*(leaf.clone() for leaf in leaves))
        results = f(*inputs)
        loss = sum((_weighted(r) for r in (*results, *inputs) if r.requires_grad), torch.zeros((), dtype=torch.float64))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not loss.requires_grad:
        return results, inputs, []
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return results, inputs, [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def _weighted(result: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1, result.numel(), dtype=torch.float64, device=result.device).view(result.shape)
    return (result.double() * weights).sum().cpu()


# ---- growing --------------------------------------------------------------------------------------------------------


class Dropped(Exception):
    """There is nothing to apply this operation to."""


@dataclass
class Grower:
    """State of one program's growth: `space` holds the module's names and the tensors that the program's names stand for.

    `special`: NaN, infinities and the extremes of integers may occur."""

    seed: int
    rng: random.Random
    gradients: bool
    special: bool
    floats: tuple[str, ...]
    most: int = MAX_NUMEL
    bases: list[tuple[str, str]] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=dict)

    def pick(self, *kinds: str, rank: int = 0, most_rank: int = 9) -> str:
        """A name of one of the kinds (float, int, bool, any), late ones more often."""
        fits = [n for n in self.names if rank <= self[n].dim() <= most_rank and ("any" in kinds or kind_of(self[n]) in kinds)]
        if not fits:
            raise Dropped
        return fits[min(int(self.rng.triangular(0, len(fits), len(fits))), len(fits) - 1)]

    def partner(self, name: str, *kinds: str) -> str:
        """Another name, whose shape broadcasts with that of `name` where there is one."""
        fits = [n for n in self.names if kind_of(self[n]) in kinds and _broadcast(self[n], self[name])]
        return self.rng.choice(fits) if fits else self.pick(*kinds)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.space[name]

    def dim(self, name: str) -> int:
        return self.rng.randrange(self[name].dim())

    def filled_dim(self, name: str) -> int:
        """A dimension that is not empty."""
        fits = [d for d, n in enumerate(self[name].shape) if n]
        if not fits:
            raise Dropped
        return self.rng.choice(fits)

    def number(self) -> float:
        return self.rng.choice((round(self.rng.uniform(-2, 2), 3), 0.5, 2.0, -1.0))

    def data_seed(self) -> int:
        return self.rng.randrange(1000, 100_000)

    def add_input(self, expr: str) -> str:
        """One more base of its own, and the input that is that base."""
        base, name = f"b{len(self.bases)}", f"x{len(self.inputs)}"
        self.bases.append((base, expr))
        self.inputs.append((name, base))
        self.space[name] = eval(expr, self.space)
        return name


def kind_of(t: torch.Tensor) -> str:
    return "bool" if t.dtype is torch.bool else "float" if t.dtype.is_floating_point else "int"


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a.shape), reversed(b.shape), strict=False))


Operation = Callable[[Grower, str], str]


def grow(
    seed: int, operations: Mapping[Operation, float], raising: Sequence[Operation] = (), gradients: bool = False
) -> Program:
    """The program of a seed: always the same one. `raising` are the operations of which one may end it."""
    for attempt in range(50):
        program = _grown(seed, random.Random(f"{seed} {attempt} {gradients}"), operations, raising, gradients)
        if program is not None:
            return program
    raise RuntimeError(f"no program of seed {seed} runs")


def _grown(
    seed: int, rng: random.Random, operations: Mapping[Operation, float], raising: Sequence[Operation], gradients: bool
) -> Program | None:
    g = _with_inputs(seed, rng, gradients)
    steps, tries = rng.randint(3, 10), 0
    while len(g.lines) < steps and tries < 30 * steps:
        tries += 1
        try_line(g, rng.choices(list(operations), list(operations.values()))[0])
    raises = ""
    if raising and not gradients and rng.random() < 0.12:
        raises = _try_raising(g, rng.choice(raising))
    dynamic = rng.random() < 0.12
    program = Program(seed, tuple(g.bases), tuple(g.inputs), tuple(g.lines), _outputs(g, raises), gradients, dynamic, raises)
    return program if g.lines and runs(program) and _settled(program) else None


def _outputs(g: Grower, raises: str) -> tuple[str, ...]:
    """The last results and some others, inputs now and then."""
    made = [n for n in g.names if n.startswith("v")]
    chosen = [*made[-2:], *(n for n in made[:-2] if g.rng.random() < 0.25), *(n for n in g.names[:2] if g.rng.random() < 0.06)]
    if raises and g.lines[-1].startswith("v"):
        chosen.append(g.lines[-1].split(" = ")[0])
    return tuple(dict.fromkeys(chosen)) or (g.inputs[0][0],)


def _settled(program: Program) -> bool:
    """Gradients that are not finite would hide all others."""
    if not program.gradients:
        return True
    space = program.load()
    try:
        _, _, found = differentiated(space["f"], space["views"], space["make"]())
    except (RuntimeError, NotImplementedError):
        return False
    return bool(found) and all(bool(x.isfinite().all()) for x in found)


def _with_inputs(seed: int, rng: random.Random, gradients: bool) -> Grower:
    floats = tuple(dict.fromkeys(rng.choices(list(FLOATS), list(FLOATS.values()), k=rng.choice((1, 1, 2)))))
    g = Grower(seed, rng, gradients, not gradients and rng.random() < 0.2, floats)
    exec(PRELUDE.format(device="cpu"), g.space)
    sizes = SIZES
    if rng.random() < 1 / 12:
        g.most, sizes = LARGE_NUMEL, LARGE_SIZES
    shape = [rng.choice(sizes) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)))]
    while _product(shape) > g.most // 2:
        shape[rng.randrange(len(shape))] = rng.choice((1, 2, 3, 5))
    if shape and rng.random() < 0.06:
        shape[rng.randrange(len(shape))] = 0
    for k in range(rng.choice((1, 2, 2, 3))):
        _add_base(g, k, shape)
    _alias_inputs(g)
    return g


def _add_base(g: Grower, k: int, shape: Sequence[int]) -> None:
    rng = g.rng
    if k and shape and rng.random() < 0.4:  # broadcasts against the first
        shape = [1 if rng.random() < 0.4 else n for n in shape][rng.randrange(len(shape)) :]
    kind = "float" if k == 0 and (g.gradients or rng.random() < 0.85) else rng.choices(["float", "int", "bool"], [5, 4, 1])[0]
    stored, suffix = _layout(rng, shape)
    g.bases.append((f"b{k}", data(g, kind, stored)))
    g.inputs.append((f"x{k}", f"b{k}{suffix}"))
    _read_inputs(g)


def _alias_inputs(g: Grower) -> None:
    """Another input that is a view of a base."""
    if g.rng.random() > 0.2:
        return
    base = g.rng.choice(g.bases)[0]
    t = g[base]
    if t.dim() == 0 or t.numel() == 0:
        return
    d = g.rng.randrange(t.dim())
    forms = (f"{base}",
             f"{base}.select({d}, {t.shape[d] - 1})",
             f"{base}.narrow({d}, {t.shape[d] // 2}, {(t.shape[d] + 1) // 2})",
             f"{base}.transpose(0, -1)", f"{base}.view(-1)")  # fmt: skip
    g.inputs.append((f"x{len(g.inputs)}", g.rng.choice(forms)))
    _read_inputs(g)


def _read_inputs(g: Grower) -> None:
    for name, expr in (*g.bases, *g.inputs):
        if name not in g.space:
            g.space[name] = eval(expr, g.space)
    g.names = [name for name, _ in g.inputs]


def _layout(rng: random.Random, shape: Sequence[int]) -> tuple[list[int], str]:
    """The shape of a base, and what makes a view of `shape` of it."""
    how = rng.choices(["plain", "turned", "stepped", "offset", "expanded", "inner"], [6, 2, 2, 1, 1, 1])[0]
    stored = list(shape)
    if how == "turned" and len(shape) > 1:
        order = list(range(len(shape)))
        rng.shuffle(order)
        stored = [0] * len(shape)
        for d, source in enumerate(order):
            stored[source] = shape[d]
        return stored, f".permute({', '.join(map(str, order))})"
    if how == "stepped" and shape:
        stored[-1] *= 2
        return stored, "[..., ::2]"
    if how == "offset" and shape:
        stored[0] += 1
        return stored, "[1:]"
    if how == "inner" and shape:
        stored[-1] += 3
        return stored, f"[..., 1:{shape[-1] + 1}]"
    if how == "expanded" and shape and shape[0] > 1:
        stored[0] = 1
        return stored, f".expand({', '.join(map(str, shape))})"
    return stored, ""


def data(g: Grower, kind: str, shape: Sequence[int]) -> str:
    """An expression for numbers of a kind."""
    seed, numbers = g.data_seed(), "".join(f", {n}" for n in shape)
    if kind == "bool":
        return f"(randn({seed}{numbers}) > 0).to(D)"
    if kind == "int":
        return _integers(g, seed, numbers)
    dtype = g.rng.choice(g.floats)
    made = f"randn({seed}{numbers})" if g.rng.random() < 0.8 else f"randint({seed}, -4, 5{numbers})"
    if g.special and g.rng.random() < 0.7:
        values = g.rng.sample(['float("nan")', 'float("inf")', '-float("inf")', "-0.0", "1e30", "3e-39"], 3)
        made = f"sprinkled({seed + 1}, {made}.to(f32), {', '.join(values)})"
    return f"{made}.to({dtype}).to(D)"


def _integers(g: Grower, seed: int, numbers: str) -> str:
    dtype = g.rng.choices(list(INTEGERS), list(INTEGERS.values()))[0]
    info = torch.iinfo(DTYPES[dtype])
    low, high = max(info.min, g.rng.choice((0, -9))), g.rng.choice((4, 9, 100))
    made = f"randint({seed}, {low}, {high}{numbers})"
    if g.special and g.rng.random() < 0.7:
        made = f"sprinkled({seed + 1}, {made}, {info.min}, {info.max}, {info.max - 1}, 0)"
    return f"{made}.to({dtype}).to(D)"


# ---- one statement --------------------------------------------------------------------------------------------------


def try_line(g: Grower, make: Operation) -> bool:
    """Adds the statements of one operation, or leaves everything as it was, inputs that they wanted included."""
    name = f"v{len(g.lines)}"
    bases, inputs = len(g.bases), len(g.inputs)
    line = ""
    try:
        line = make(g, name)
        with torch.set_grad_enabled(g.gradients):
            exec(line, g.space)
        fine = all(_is_tame(g, t) for t in _tensors(g, name))
    except Exception:
        fine = False
    if fine:
        g.lines.append(line)
        g.names = [n for n, _ in g.inputs] + [n for n in g.names if n.startswith("v")]
        if name in g.space:
            g.names.append(name)
        return True
    del g.bases[bases:], g.inputs[inputs:]
    g.space.pop(name, None)
    if _writes(line):
        _replay(g)
    return False


def _try_raising(g: Grower, make: Operation) -> str:
    """Adds a statement that eager refuses, and gives the class of its exception; "" where it does not raise."""
    name = f"v{len(g.lines)}"
    bases, inputs = len(g.bases), len(g.inputs)
    try:
        line = make(g, name)
        exec(line, dict(g.space))
    except (IndexError, RuntimeError) as error:
        g.lines.append(line)
        return type(error).__name__
    except Exception:
        pass
    del g.bases[bases:], g.inputs[inputs:]
    return ""


def _tensors(g: Grower, name: str) -> list[torch.Tensor]:
    found = [g[n] for n in (*g.names, *(n for n, _ in g.inputs)) if n in g.space]
    result = g.space.get(name)
    if result is not None and not isinstance(result, torch.Tensor):
        raise Dropped
    return found if result is None else [*found, result]


def _is_tame(g: Grower, t: torch.Tensor) -> bool:
    if t.numel() > g.most or t.dim() > 5 or t.dtype not in DTYPE_NAMES:
        return False
    if g.special or kind_of(t) != "float":
        return True
    return bool((t.isfinite() & (t.abs() <= MAX_VALUE)).all())


def _writes(line: str) -> bool:
    return bool(re.search(r"_\(|\] [-+*]?= |\w\.\w+ = ", line)) or "\n" in line


def _replay(g: Grower) -> None:
    """The program so far from its start: a statement that was left out has written."""
    for name, expr in (*g.bases, *g.inputs):
        g.space[name] = eval(expr, g.space)
    with torch.set_grad_enabled(g.gradients):
        for line in g.lines:
            exec(line, g.space)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _product(numbers: Sequence[int]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total
