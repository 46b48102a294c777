"""Random loops of the program fuzzer: Python loops over rows, and loops and branches that tensors decide.

Iterations of a *Python loop* are nearly independent: rows, columns, windows, elements, from either end, with wrapped and
repeated indices. They write in place, carry values, read what earlier ones wrote, and write through views. Rolling, batching
and unrolling (docs/loops.md) must each see what depends on what.

A *converted* program is for `kgen.control_flow`: `while`, `if`, `break` and `continue` on values of tensors.

Both are `Program`s of tests/fuzz_program.py, with the oracle, workers and shrinking of other programs. `ROWS` is a length that
may differ between calls.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from fuzz_program import Program, differentiated, runs

DTYPES = {"f64": 6, "f32": 3, "i64": 1}
# Python loops are unrolled up to 64 steps. A converted one of a fixed length is a loop from there on.
LONG = 66


@dataclass
class Drawing:
    """What the parts of one program share: x0 to x3 are matrices, x4 a square one, x5 a row. v0 to v2 are written."""

    rng: random.Random
    dtype: str
    gradients: bool
    steps: int = 4
    width: int = 3
    used: set[str] = field(default_factory=set)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def column(self) -> int:
        return self.rng.randrange(self.width)

    def index(self) -> str:
        """A row of iteration `i`: mostly its own, sometimes that of another iteration or none."""
        n, r = self.steps, self.rng
        others = (
            f"{n - 1} - i", "-1 - i", f"i + {r.randrange(1, n + 2)}", "2 * i", "2 * i + 1", f"{2 * n} - 2 * i",
            f"-{r.randrange(1, 4)} - i", f"{n} + i", "i // 2", "order[i]", "rows - 1 - i", "rows // 2 - i", "rows // 2 + i",
        )  # fmt: skip
        return "i" if self.chance(0.3) else r.choice(others)

    def place(self) -> tuple[str, str]:
        """Where a buffer is written, and the kind of value that fits: "row", "element", "part" or "window"."""
        k, draw = self.index(), self.rng.random()
        if draw < 0.5:
            return f"[{k}]", "row"
        if draw < 0.6:
            return f"[{k}, {self.column()}]", "element"
        if draw < 0.68:
            return f"[{k}, {self.rng.choice(('1:', ':2', '::2', ':'))}]", "part"
        if draw < 0.8:
            return f"[{k}:{k} + {self.rng.choice((1, 2, 3))}]", "window"
        return f"[{k}, {'-1' if draw > 0.9 else f'i % {self.width}'}]", "element"

    def row(self, depth: int = 0) -> str:
        """A value of a row's shape."""
        draw = self.rng.random()
        base = self.rng.choice(("x0", "x1", "v0", "v1", "v2"))
        if depth > 1 or draw < 0.4:
            return f"{base}[{self.index()}]"
        if draw < 0.7:
            return f"({self.row(depth + 1)} {self.rng.choice('+-*')} {self.rng.choice((self.row(depth + 1), 'x5', '(i + 1)'))})"
        if draw < 0.77:
            return self._nonlinear(self.row(depth + 1))
        if draw < 0.85:
            return f"({self.row(depth + 1)}).cumsum(0)"
        if draw < 0.9:
            return f"{base}[:, {self.column()}][{self.index()}] * x5"
        if draw < 0.95:
            self.used.add("carried")
            return "carried"
        return f"x3[{self.index()}].flip(0)"

    def _nonlinear(self, row: str) -> str:
        return f"({row}).clamp(-3, 4)" if self.dtype == "i64" else f"torch.tanh({row} @ x4)"

    def written(self) -> str:
        return self.rng.choice(("v0", "v0", "v1", "v2"))

    def statement(self) -> str:
        """One of a loop's body: statements with the body's indent."""
        (place, kind), value, buffer, draw = self.place(), self.row(), self.written(), self.rng.random()
        value = {"element": f"({value})[{self.column()}]", "part": f"({value}).sum()"}.get(kind, value)
        if draw < 0.1:
            return self._kept("carried", f"carried = {self.row()}")
        if draw < 0.2:
            return self._kept("parts", f"parts.append({self.row()})")
        if draw < 0.6:
            return f"{buffer}{place} = {value}"
        if draw < 0.7:
            return f"{buffer}{place} {self.rng.choice('+-*')}= {value}"
        if draw < 0.78:
            return f"{buffer}{place}.mul_({self.rng.choice(('2', 'i + 1', '-1'))})"
        if draw < 0.84:
            return f"{buffer}.select(0, {self.rng.choice(('i', f'{self.steps - 1} - i', 'i + 1'))}).add_({self.row()})"
        if draw < 0.88:
            return f"{buffer}.narrow(0, {self.rng.choice(('i', '2 * i'))}, 2).sub_({self.rng.choice(('1', 'x5'))})"
        if draw < 0.93:
            part, number = self.rng.choice(("0", "1:", ":")), self.rng.choice(("0", "i", "x5[0]"))
            return f"seen = {buffer}[{self.index()}]\nseen[{part}] = {number}"
        return f"{buffer}{place} = 3" if kind == "element" else f"{buffer}{place}.copy_({value})"

    def _kept(self, name: str, statement: str) -> str:
        self.used.add(name)
        return statement

    def branched(self, statement: str) -> list[str]:
        """The statement, sometimes under a condition that Python decides."""
        lines = statement.split("\n")
        if not self.chance(0.15):
            return lines
        condition = self.rng.choice(("i % 2", "i > 1", "i % 2 == 0", f"i != {self.steps - 1}"))
        return [f"if {condition}:", *(f"    {line}" for line in lines)]


def grow_loop(seed: int, gradients: bool = False, converted: bool = False) -> Program:
    """The program of a seed: always the same one."""
    for attempt in range(100):
        rng = random.Random(f"loop {seed} {attempt} {gradients} {converted}")
        dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
        d = Drawing(rng, "f64" if gradients and dtype == "i64" else dtype, gradients, rng.randint(3, 6), rng.randint(3, 5))
        program = (_converted if converted else _python_loop)(seed, d)
        if runs(program) and _finite(program):
            return program
    raise RuntimeError(f"no loop of seed {seed} runs")


def _finite(program: Program) -> bool:
    """NaNs and infinities would hide other differences."""
    space = program.load()
    if not program.gradients:
        with torch.no_grad():
            return all(bool(t.isfinite().all()) for t in space["f"](*space["views"](*space["make"]())))
    results, _, found = differentiated(space["f"], space["views"], space["make"]())
    return bool(found) and all(bool(t.isfinite().all()) for t in (*results, *found))


def _bases(d: Drawing) -> list[tuple[str, str]]:
    shapes = [f"ROWS, {d.width}"] * 4 + [f"{d.width}, {d.width}", f"{d.width}"]
    kind = (lambda s: f"randint({s}, -3, 4, ") if d.dtype == "i64" else (lambda s: f"0.7 * randn({s}, ")
    return [
        (f"b{k}", f"({kind(d.rng.randrange(1000, 100_000))}{shape})).to({d.dtype}).to(D)") for k, shape in enumerate(shapes)
    ]


def _inputs(d: Drawing) -> list[tuple[str, str]]:
    """Matrices may be turned in memory."""
    return [(f"x{k}", f"b{k}.t().contiguous().t()" if k < 4 and d.chance(0.1) else f"b{k}") for k in range(6)]


def _program(seed: int, d: Drawing, lines: list[str], outputs: list[str], rows: int, converted: bool = False) -> Program:
    how = d.rng.choices(("static", "dynamic", "marked"), (3, 1, 1))[0]
    marked = tuple(f"x{k}" for k in range(4)) if how == "marked" else ()
    return Program(seed, tuple(_bases(d)), tuple(_inputs(d)), tuple(lines), tuple(outputs), d.gradients, how == "dynamic",
                   rows=rows, marked=marked, converted=converted)  # fmt: skip


# ---- loops that Python unrolls --------------------------------------------------------------------------------------


def _python_loop(seed: int, d: Drawing) -> Program:
    body: list[str] = []
    for _ in range(d.rng.randint(1, 3)):
        body += d.branched(d.statement())
    if d.chance(0.3):
        body += [d._kept("parts", f"parts.append({d.row()})")]
    counted = d.rng.choice(["range({n})"] * 4 + ["reversed(range({n}))", "range(1, {n})", "range({n} - 1)"]).format(n=d.steps)
    lines = [*_buffers(d), f"for i in {counted}:", *(f"    {line}" for line in body)]
    names = ["v0", "v1", "v2", *(["carried"] if "carried" in d.used else [])]
    if "parts" in d.used:
        lines.append("v3 = torch.stack(parts) if parts else x5 * 2")
        names.append("v3")
    if d.chance(0.3):
        lines.append("v4 = v0.sum(0)")
        names.append("v4")
    lines = [line for line in lines if line != "rows = x0.shape[0]" or any("rows" in other for other in lines[1:])]
    return _program(seed, d, lines, d.rng.sample(names, d.rng.randint(1, len(names))), 2 * d.steps + 3)


def _buffers(d: Drawing) -> list[str]:
    """What is in memory before the loop: inputs, copies, views of each other, turned ones."""
    first = ("x2", "x2", "x0.clone()", "torch.zeros_like(x0)", "x0 * 1", "x0.flip(0) * 1", "x0.t().contiguous().t()")
    second = ("x1.clone()", "torch.zeros_like(x0)", "v0.clone()", "v0.flip(0)", "v0[1:]")
    third = ("v0", "v1", "v0.clone()", "torch.ones_like(x0)", "v1.t().t()")
    lines = ["rows = x0.shape[0]", *(f"v{k} = {d.rng.choice(forms)}" for k, forms in enumerate((first, second, third)))]
    factor = d.rng.randrange(1, 9)
    lines.append(f"order = [({factor} * k + 1) % {d.steps} for k in range({d.steps})]")
    if "carried" in d.used:
        lines.append("carried = x5 * 2")
    return [*lines, "parts = []"] if "parts" in d.used else lines


# ---- loops and branches that tensors decide -------------------------------------------------------------------------


def _converted(seed: int, d: Drawing) -> Program:
    """Gradients need loops whose length no tensor decides."""
    counted = d.gradients or d.chance(0.5)
    rows = d.rng.choice((2 * d.steps + 3, LONG))
    body: list[str] = []
    for _ in range(d.rng.randint(1, 3)):
        body += _decided(d, _step(d), leaves=not d.gradients)
    head = ["v0 = x0.clone()", "v1 = x5 * 2", f"v2 = torch.zeros((), dtype={d.dtype}, device=D)"]
    if counted:
        start = d.rng.choice(("", "", "1, "))
        loop = [f"for i in range({start}x0.shape[0]):", *(f"    {line}" for line in body)]
    else:
        count = d.rng.choice(("0", "torch.zeros((), dtype=i64, device=D)"))
        tensor = count != "0"
        head.append(f"i = {count}")
        end = f"i < {d.rng.choice((d.steps, 'x0.shape[0]'))}" + (f" and {_condition(d)}" if d.chance(0.5) else "")
        body = [line for line in body if line != "    continue"] or ["pass"]
        loop = [
            f"while {end}:",
            *(f"    {line}" for line in body),
            "    i = i + 1" if tensor or d.chance(0.5) else "    i += 1",
        ]
    lines = head + loop
    if d.chance(0.4):
        lines += _decided(d, "v1 = v1 - v0.sum(0)", leaves=False)
    return _program(seed, d, lines, d.rng.sample(["v0", "v1", "v2"], d.rng.randint(1, 3)), rows, converted=True)


def _condition(d: Drawing) -> str:
    number = d.rng.choice((-3, -1, 0, 1, 2, 5))
    value = d.rng.choice(("v1.sum()", "v2", "v1[0]", "v0[0].sum()", "x1[0, 0]"))
    return f"{value} {d.rng.choice('<>')} {number}"


def _here(d: Drawing) -> str:
    return d.rng.choice(("v0[i]", "x1[i]", "x1[i]", "v0[i - 1]", "x2[-1 - i]", "v0[0]"))


def _step(d: Drawing) -> str:
    row, smaller = _here(d), "// 2" if d.dtype == "i64" else "* 0.5"
    return d.rng.choice((
        f"v1 = v1 {smaller} + {row}", f"v1 = ({row} - v1).clamp(-2, 2)", f"v0[i] = {row} + v1", f"v0[i] += {row}",
        f"v0[i, {d.column()}] = v1.sum()", f"v2 = v2 + ({row}).sum()", f"v0[i].mul_(2).sub_({row})", "v0[-1 - i] = v1",
        f"v1 = {d._nonlinear('v1')} + x5", f"v0[i][{d.column()}] = v1[0]", f"v0[i][1:].mul_(2)[0].add_({row}[0])",
        f"v0[:, {d.column()}][i] += v2", f"v2 += ({row}).sum()", "v0[i], v1 = v1, v0[i] + 1", f"v0[i - 1] -= {row}",
        f"row = v0[i]\nv0[i] = {row} - 1\nv2 = v2 + row[0]", f"row = v0[i]\nrow[{d.column()}] = v1[0]",
        f"row = {row}.clone()\nrow += v1\nv0[i] = row", f"seen = {row}\nv1 = v1 + seen * 2", "v0[i].copy_(v0[i - 1])",
        _inner(d, row),
    ))  # fmt: skip


def _inner(d: Drawing, row: str) -> str:
    """A loop in the loop, over elements."""
    body = d.rng.choice((
        "v0[i, j] = v0[i, j - 1] + x1[i, j]", "v2 = v2 + v0[i, j]", f"v1 = v1 + {row} * j",
        "if v0[i, j] > 0:\n    v0[i, j] = v0[i, j] - x1[i, j]", "if x1[i, j] > 0:\n    v2 = v2 + 1\nelse:\n    v1 = v1 - 1",
    ))  # fmt: skip
    ends = "\nif v2 > 2:\n    break" if not d.gradients and d.chance(0.3) else ""
    lines = (body + ends).split("\n")
    return "\n".join([f"for j in range({d.rng.choice((d.width, 'x0.shape[1]'))}):", *(f"    {line}" for line in lines)])


def _decided(d: Drawing, statement: str, leaves: bool) -> list[str]:
    """The statement, under a condition that a tensor decides, or before the loop is left."""
    draw, lines = d.rng.random(), statement.split("\n")
    if draw < 0.45:
        return lines
    indented = [f"    {line}" for line in lines]
    condition = f"({_here(d)}).sum() > 0" if leaves and d.chance(0.4) else _condition(d)
    if draw < 0.6:
        return [f"if {condition}:", *indented]
    if draw < 0.8 or not leaves:
        other = statement.replace("+", "-") if "+" in statement and len(lines) == 1 else "v1 = v1 + 1"
        return [f"if {condition}:", *indented, "else:", f"    {other}"]
    return [*lines, f"if {condition}:", f"    {d.rng.choice(('break', 'break', 'continue'))}"]
