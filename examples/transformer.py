"""Trains a GPT with a compiled forward, backward and optimizer step: checked against eager, timed against eager and Inductor.

python -m examples.transformer                # what `make demo` runs: on a CPU a small model, float32 only
python -m examples.transformer --size full    # a model of 45 million parameters, on a CPU some minutes a type
python -m examples.transformer --quick        # float32 only, few rounds, no fresh processes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw

from bench.measure import as_json, cache_environment, interleave, machine_facts, seconds_of
from bench.memory import peak_of
from examples.gpt import FULL, GPT, SMALL, TINY, Shape, random_batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Eager in this precision says what is right: eager in bfloat16 is itself some per cent off in a gradient summed over tokens.
REFERENCE = {"float32": "float64", "bfloat16": "float32"}
SHAPES = {"full": FULL, "small": SMALL, "tiny": TINY}
LEARNING_RATE = 3e-4
# The largest relative difference from the reference, by norm: of the loss, of each gradient, of each parameter after a step.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
MORE_SEQUENCES = (0, 1, 3)  # than the model has been compiled for
Tokens = tuple[Tensor, Tensor]


# ---- training -----------------------------------------------------------------------------------------------------------


class AdamW:
    """torch's AdamW as one function of the gradients: `torch.optim.Optimizer.step` itself breaks the graph once."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]
        self.steps = [torch.zeros((), device=p.device) for p in parameters]

    @torch.no_grad()
    def update(self, gradients: list[Tensor]) -> None:
        adamw(
            self.parameters, gradients, self.mean, self.square, [], self.steps,
            amsgrad=False, beta1=0.9, beta2=0.999, lr=LEARNING_RATE, weight_decay=0.01, eps=1e-8, maximize=False,
            capturable=self.parameters[0].is_cuda,
        )  # fmt: skip


class Trainer:
    """A model, its optimizer and one back end ("eager" for none). Equal seeds give equal parameters."""

    def __init__(self, backend: str, setting: Setting, dynamic: bool | None = None) -> None:
        torch.manual_seed(0)
        self.model = GPT(setting.shape).to(setting.device, DTYPES[setting.dtype])
        self.parameters = list(self.model.parameters())
        self.optimizer = AdamW(self.parameters)
        self.loss: Callable[..., Tensor] = self.model
        self.update: Callable[[list[Tensor]], None] = self.optimizer.update
        if backend != "eager":
            # fullgraph: a graph break is an error.
            self.loss = torch.compile(self.model, backend=backend, fullgraph=True, dynamic=dynamic)
            self.update = torch.compile(self.optimizer.update, backend=backend, fullgraph=True)

    def backward(self, batch: Tokens) -> Tensor:
        loss = self.loss(*batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: Tokens) -> Tensor:
        loss = self.backward(batch)
        self.update(self.gradients())
        self.model.zero_grad(set_to_none=True)
        return loss

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


@dataclass(frozen=True)
class Setting:
    """What one part of the demo runs on."""

    shape: Shape
    dtype: str
    device: str

    def batch(self, batch: int = 0, sequence: int = 0) -> Tokens:
        torch.manual_seed(1)
        return random_batch(self.shape, self.device, batch, sequence)


# ---- is it right? -------------------------------------------------------------------------------------------------------


def check(backends: list[str], setting: Setting) -> tuple[list[dict[str, Any]], dict[str, Trainer]]:
    """Largest relative differences from eager in a wider precision: loss, gradients, parameters after a step, loss after three
    steps. One row a back end; and the trainers, compiled, of those that work."""
    trainer, trainers = reference_trainer(setting), dict[str, Trainer]()
    batch = setting.batch()
    reference: dict[str, Any] = {"loss": trainer.backward(batch), "gradients": trainer.gradients()}
    # The same gradients for all: AdamW's first step is the sign of a gradient, so it enlarges the smallest difference.
    shared = [g.to(DTYPES[setting.dtype]) for g in trainer.gradients()]
    trainer.update([g.to(w.dtype) for g, w in zip(shared, trainer.parameters, strict=True)])
    trainer.model.zero_grad(set_to_none=True)
    reference["parameters"] = [p.detach().clone() for p in trainer.parameters]
    reference["later loss"] = [trainer.step(batch) for _ in range(2)][-1]
    del trainer

    def one(name: str) -> dict[str, Any]:
        made = Trainer(name, setting)
        row = check_one(name, made, setting, (reference, shared))
        trainers[name] = made
        return row

    return [guarded(lambda name=name: one(name), backend=name, dtype=setting.dtype) for name in backends], trainers


def reference_trainer(setting: Setting) -> Trainer:
    """Eager in the wider precision, from the parameters that all others begin with."""
    wide = Trainer("eager", replace(setting, dtype=REFERENCE[setting.dtype]))
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters, Trainer("eager", setting).parameters, strict=True):
            mine.copy_(theirs)
    return wide


def check_one(
    backend: str, trainer: Trainer, setting: Setting, expected: tuple[dict[str, Any], list[Tensor]]
) -> dict[str, Any]:
    """Also the seconds of the first step, which compiles, beyond a later one."""
    (reference, gradients), batch, losses = expected, setting.batch(), list[Tensor]()
    first = seconds_of(lambda: losses.append(trainer.backward(batch)))
    found = {"loss": difference(reference["loss"], losses[-1])}
    dtype = DTYPES[setting.dtype]
    found["gradients"] = largest_difference(reference["gradients"], trainer.gradients(), dtype)
    trainer.model.zero_grad(set_to_none=True)
    given = [g.clone() for g in gradients]
    first += seconds_of(lambda: trainer.update(given))
    found["parameters"] = largest_difference(reference["parameters"], trainer.parameters, dtype)
    steady = min(seconds_of(lambda: losses.append(trainer.step(batch))) for _ in range(2))
    found["later loss"] = difference(reference["later loss"], losses[-1])
    ok = max(found.values()) <= TOLERANCE[setting.dtype]
    return {"backend": backend, "dtype": setting.dtype, "ok": ok, "compile": first - steady, **found}


def largest_difference(expected: list[Tensor], actual: list[Tensor], dtype: torch.dtype | None = None) -> float:
    return max(difference(e, a, dtype) for e, a in zip(expected, actual, strict=True))


def difference(expected: Tensor, actual: Tensor, dtype: torch.dtype | None = None) -> float:
    """The norm of the difference over the norm of what is expected; infinite when the shapes differ, when `actual` has another
    dtype than `dtype` (default: what is expected has), or when a number is not one."""
    if actual.dtype != (dtype or expected.dtype) or expected.shape != actual.shape:
        return math.inf
    wide = expected.double()
    found = ((wide - actual.double()).norm() / wide.norm().clamp(min=1e-12)).item()
    return found if math.isfinite(found) else math.inf


def check_dynamic(backend: str, compiled: Trainer, setting: Setting) -> dict[str, Any]:
    """Three batch sizes times three sequences, the first of them those that `compiled` has been compiled for: how often Dynamo
    compiles the model again, and whether each loss and gradient is eager's."""
    torch._dynamo.utils.counters.clear()
    eager = Trainer("eager", setting)
    with torch.no_grad():
        for mine, theirs in zip(compiled.parameters, eager.parameters, strict=True):
            mine.copy_(theirs)
    length = setting.shape.sequence
    sequences = (length, length // 2, length * 3 // 4)
    worst = 0.0
    for turn in range(9):  # both sizes change with each of the first steps, so one recompilation can learn both
        count = setting.shape.batch + MORE_SEQUENCES[turn % 3]
        batch = setting.batch(count, sequences[(turn + turn // 3) % 3])
        worst = max(worst, difference(eager.backward(batch), compiled.backward(batch)))
        worst = max(worst, largest_difference(eager.gradients(), compiled.gradients()))
        for trainer in (eager, compiled):
            trainer.model.zero_grad(set_to_none=True)
    recompilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    ok = worst <= TOLERANCE[setting.dtype] and recompilations <= 1
    return {"backend": backend, "shapes": 9, "recompilations": recompilations, "difference": worst, "ok": ok}


# ---- how fast, how large? -----------------------------------------------------------------------------------------------


def time_steps(trainers: dict[str, Trainer], setting: Setting, rounds: int) -> dict[str, Any]:
    """Medians of whole steps and of forward and backward alone, contenders taking turns."""
    batch = setting.batch()
    contenders = {f"{name} step": (lambda t=t: t.step(batch)) for name, t in trainers.items()}
    contenders |= {f"{name} backward": (lambda t=t: forward_backward(t, batch)) for name, t in trainers.items()}
    return as_json(interleave(contenders, seconds=0.0, sample=0.0, rounds=rounds))


def forward_backward(trainer: Trainer, batch: Tokens) -> None:
    trainer.backward(batch)
    trainer.model.zero_grad(set_to_none=True)


def run_worker(backend: str, setting: Setting) -> dict[str, Any]:
    """In a process of its own, which finds on disk what the demo has compiled: seconds until the first step is done beyond a
    later step, and the peak memory of a step."""
    trainer, batch = Trainer(backend, setting), setting.batch()
    first = seconds_of(lambda: trainer.step(batch))
    steady = statistics.median(seconds_of(lambda: trainer.step(batch)) for _ in range(3))
    peak = peak_of(lambda: trainer.step(batch), setting.device)
    return {
        "compile": first - steady,
        "rest_bytes": peak.rest,
        "peak_bytes": peak.peak,
        "above_rest_bytes": peak.above_rest,
        "counters": coverage() if backend == "kgen" else {},
    }


def fresh_process(backend: str, setting: Setting, options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.transformer", "--worker", backend, "--dtype", setting.dtype]
    command += ["--size", options.size, "--batch", str(setting.shape.batch), "--device", setting.device]
    command += ["--threads", str(torch.get_num_threads())]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        command, cwd=root, env=os.environ | cache_environment(cache), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


# ---- what did kgen do? --------------------------------------------------------------------------------------------------


def coverage() -> dict[str, Any]:
    import kgen

    try:
        return dict(kgen.coverage())
    except (AttributeError, ImportError):
        return {}


def explain(setting: Setting, console: Console) -> dict[str, Any]:
    """Prints the report on the model's forward and backward; returns its counts."""
    import kgen

    try:
        report = kgen.explain(Trainer("eager", setting).model, *setting.batch())
    except (AttributeError, ImportError) as cause:
        console.print(f"kgen.explain: {cause}")
        return {}
    return {"kernels": len(report.kernels), "externs": list(map(str, report.externs))}


# ---- the report ---------------------------------------------------------------------------------------------------------


def print_checks(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Relative difference from eager in a wider precision")
    names = ["loss", "gradients", "parameters", "later loss"]
    for column in ("backend", "dtype", *names, "limit", "right"):
        table.add_column(column, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["backend"], row["dtype"], "failed")
            console.print(f"{row['backend']} failed: {row['error']}")
            continue
        cells = [f"{row[name]:.1e}" for name in names]
        table.add_row(row["backend"], row["dtype"], *cells, f"{TOLERANCE[row['dtype']]:.0e}", "yes" if row["ok"] else "NO")
    console.print(table)


def print_measures(result: dict[str, Any], backends: list[str], console: Console) -> None:
    table = Table(title=f"A training step, {result['dtype']} (medians; contenders take turns)")
    columns = (
        "backend",
        "step ms",
        "spread",
        "of eager",
        "fwd+bwd ms",
        "cold compile s",
        "warm compile s",
        "peak MB",
        "above rest MB",
    )
    for column in columns:
        table.add_column(column, justify="right")
    times = result["times"]
    for name in backends:
        step = times.get(f"{name} step")
        if step is None:
            table.add_row(name, "failed")
            continue
        cold, warm = result["cold"].get(name, {}), result["warm"].get(name, {})
        table.add_row(
            name,
            f"{step['median'] * 1e3:.1f}",
            f"{(step['high'] - step['low']) / step['median']:.1%}",
            f"{times['eager step']['median'] / step['median']:.2f}x",
            f"{times[f'{name} backward']['median'] * 1e3:.1f}",
            number(cold, "compile", 1.0),
            number(warm, "compile", 1.0),
            number(warm, "peak_bytes", 2**20),
            number(warm, "above_rest_bytes", 2**20),
        )
    console.print(table)


def number(row: dict[str, Any], name: str, unit: float) -> str:
    if "error" in row:
        return "failed"
    return f"{row[name] / unit:.1f}" if name in row else "-"


# ---- the main job -------------------------------------------------------------------------------------------------------


def choose_device(wanted: str) -> str:
    """CUDA when there is a GPU that kgen makes code for, else the CPU."""
    if wanted != "auto":
        return wanted
    if not torch.cuda.is_available():
        return "cpu"
    try:
        torch.compile(lambda x: x + 1, backend="kgen")(torch.zeros(8, device="cuda"))
    except Exception as cause:
        print(f"kgen has no code for this GPU yet, the demo runs on the CPU: {str(cause).splitlines()[0]}", file=sys.stderr)
        return "cpu"
    finally:
        torch._dynamo.reset()
    return "cuda"


def guarded(job: Callable[[], dict[str, Any]], **labels: str) -> dict[str, Any]:
    """A contender that fails is a row of the report, not the end of it."""
    try:
        return job()
    except Exception as cause:
        lines = str(cause).strip().splitlines()
        return {**labels, "ok": False, "error": f"{type(cause).__name__}: {' '.join(lines[:2])}"}


def measure(
    setting: Setting, options: argparse.Namespace, cache: Path, console: Console
) -> tuple[dict[str, Any], dict[str, Trainer]]:
    """All numbers of one dtype, and the trainers. What this process compiles is checked, then timed; fresh processes find it in
    the cache."""
    backends = options.backends
    result: dict[str, Any] = {"dtype": setting.dtype, "warm": {}}
    torch._dynamo.reset()
    console.print(f"{setting.dtype}: comparing {', '.join(backends)} with eager in {REFERENCE[setting.dtype]}", style="dim")
    result["checks"], trainers = check(backends, setting)
    result["cold"] = {row["backend"]: row for row in result["checks"] if "error" not in row and row["backend"] != "eager"}
    console.print(f"{setting.dtype}: timing", style="dim")
    result["times"] = time_steps(trainers, setting, options.rounds)
    for name in () if options.quick else backends:
        console.print(f"{setting.dtype}: {name} in a fresh process, with what is compiled", style="dim")
        result["warm"][name] = fresh_process(name, setting, options, cache)
    return result, trainers


def share_what_is_built_once(folders: list[Path]) -> None:
    """In folders that will be kgen's caches, what it builds once a machine, from the user's own: no graph compiles that."""
    from kgen import cache
    from kgen.build import cpp

    cpp.prepare()
    cpp.wait()
    built = cache.cache_dir()
    for folder in folders:
        place = Path(cache_environment(folder)["KGEN_CACHE_DIR"]) / built.name
        place.mkdir(parents=True)
        for kind in ("runtime", "header"):
            (built / kind).mkdir(exist_ok=True)
            (place / kind).symlink_to(built / kind)


def run_demo(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    device = choose_device(options.device)
    options.size = options.size or ("small" if device == "cpu" else "full")
    shape = replace(SHAPES[options.size], batch=options.batch or SHAPES[options.size].batch)
    report: dict[str, Any] = {"machine": machine_facts(), "device": device, "shape": vars_of(shape), "dtypes": []}
    console.print(f"GPT {vars_of(shape)} on {device}, {torch.get_num_threads()} threads")
    dtypes = options.dtype or default_dtypes(options.size, device, console)
    with tempfile.TemporaryDirectory(prefix="kgen-demo-") as folder:
        if "kgen" in options.backends:
            share_what_is_built_once([Path(folder) / dtype for dtype in dtypes])
        for dtype in dtypes:
            cache = Path(folder) / dtype
            os.environ.update(cache_environment(cache))
            setting = Setting(shape, dtype, device)
            measured, trainers = measure(setting, options, cache, console)
            report["dtypes"].append(measured)
            print_checks(measured["checks"], console)
            print_measures(measured, options.backends, console)
            if dtype == dtypes[0] and "kgen" in trainers:
                compiled = trainers["kgen"]
                report["dynamic"] = guarded(lambda one=compiled, at=setting: check_dynamic("kgen", one, at), backend="kgen")
                console.print(f"3 batch x 3 sequence sizes: {report['dynamic']}")
            del trainers
        if "kgen" in options.backends:
            report["explain"] = explain(Setting(shape, dtypes[0], device), console)
            report["coverage"] = coverage()
    checks = [row for one in report["dtypes"] for row in one["checks"]] + [report.get("dynamic", {"ok": True})]
    report["ok"] = all(row["ok"] for row in checks if row.get("backend", "kgen") == "kgen")
    return report


def default_dtypes(size: str, device: str, console: Console) -> list[str]:
    """Both, but on a CPU float32 alone of a small model, most of whose time is that of Inductor's compiler, and where eager's
    matmuls in bfloat16 would be those of torch's reference, a hundred times as slow."""
    if device == "cpu" and size != "full":
        return ["float32"]
    if device != "cpu" or has_bfloat16_matmuls():
        return list(REFERENCE)
    console.print("float32 only: without AVX-512 a step of eager in bfloat16 takes minutes (--dtype float32 bfloat16: both)")
    return ["float32"]


def has_bfloat16_matmuls() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def vars_of(shape: Shape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["eager", "kgen", "inductor"], help="contenders, in the table's order")
    dtypes = "default: both; float32 with --quick, and on a CPU with another size than full or without AVX-512"
    parser.add_argument("--dtype", nargs="+", choices=tuple(REFERENCE), help=dtypes)
    parser.add_argument("--size", choices=SHAPES, help="default: small on a CPU, full on a GPU")
    parser.add_argument("--batch", type=int, default=0, help="sequences a step (default: the size's own)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds (default: 5, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="float32 only, few rounds, no fresh processes")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or (["float32"] if options.quick else [])
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.worker:
        shape = replace(SHAPES[options.size], batch=options.batch)
        print(json.dumps(run_worker(options.worker, Setting(shape, options.dtype[0], options.device))))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 128)
    report = run_demo(options, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, default=str))
    console.print("every check of kgen passed" if report["ok"] else "A CHECK OF KGEN FAILED")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
