"""Attention of unlike shapes on a GPU: each configuration of a template beside kgen's own choice; `--json` has estimates, too.

python -m bench.attention_calibration --json out/calibration.json               # about four minutes with 16 cores
python -m bench.attention_calibration --only text one --modes bf16 tf32
python -m bench.attention_calibration --device cpu --jobs 1 --shrink 64 --only "one 1x12" --modes f32      # tries it out

Shapes are those of cross-attention to few keys, of one token, of pooling, of latents, of short and long heads, written in plain
PyTorch: ``softmax(q @ k.mT * s, -1) @ v``. Modes are bfloat16, float32, and float32 with TF32. `kgen` is the default mode, what
nobody measured left to the library; `calibrated` the same as if all had been measured; others are the configurations of
`triton_attention`, with the parts of their keys. Processes compile side by side, and time one after the other.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.contenders import copy_of, failure
from bench.gpu_timing import Entry, prepare, timed
from bench.measurements import write
from kgen.only import only
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels import attention

TEMPLATE = "triton_attention"
KNOBS = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")
MODES = ("bf16", "f32", "tf32")
# Bytes of arguments that a contender goes through, several times what the L2 cache holds.
COLD, MOST_SETS = 150e6, 8
# Rows of which keys are in parts, programs that fill a GPU, keys of a part, and scores beyond which nothing is compared.
FEW, PROGRAMS, PART, MOST_SCORES = 16, 264, 256, 3e8


@dataclass(frozen=True)
class Shape:
    """Batch and heads, rows, keys, elements of a head."""

    name: str
    batch: tuple[int, int]
    rows: int
    keys: int
    head: int

    def inputs(self, dtype: torch.dtype, device: str) -> list[list[Tensor]]:
        heads = math.prod(self.batch)
        size = 2 * heads * (self.keys + self.rows) * self.head * dtype.itemsize
        generator = torch.Generator(device).manual_seed(0)

        def one(length: int) -> Tensor:
            return torch.randn(*self.batch, length, self.head, generator=generator, device=device, dtype=dtype)

        count = max(1, min(MOST_SETS, math.ceil(COLD / size))) if device == "cuda" else 1
        return [[one(self.rows), one(self.keys), one(self.keys)] for _ in range(count)]

    @property
    def written(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        scale = self.head**-0.5
        return lambda q, k, v: F.softmax(q @ k.mT * scale, -1) @ v

    def parts(self) -> list[int]:
        parts = 1
        while self.rows <= FEW and math.prod(self.batch) * parts < PROGRAMS and self.keys // (2 * parts) >= PART:
            parts *= 2
        return sorted({1, parts})

    def shrunk(self, by: int) -> Shape:
        return Shape(self.name, (1, 2), max(1, self.rows // by), max(16, self.keys // by), self.head) if by > 1 else self


SHAPES = (
    Shape("text 40", (4, 8), 4096, 77, 40),
    Shape("text 80", (4, 8), 1024, 77, 80),
    Shape("text 160", (4, 8), 256, 77, 160),
    Shape("text 64", (2, 10), 4096, 77, 64),
    Shape("few keys 64x512", (16, 12), 512, 64, 64),
    Shape("few keys 16", (32, 8), 1024, 16, 32),
    Shape("64x64", (8, 16), 64, 64, 64),
    Shape("queries to themselves", (32, 8), 100, 100, 32),
    Shape("queries to an image", (16, 8), 100, 1050, 32),
    Shape("32 queries", (8, 12), 32, 257, 64),
    Shape("latents", (16, 8), 64, 4096, 64),
    Shape("latents 128", (8, 8), 128, 4096, 32),
    Shape("one 1x12", (1, 12), 1, 1024, 64),
    Shape("one 8x12", (8, 12), 1, 1024, 64),
    Shape("one 8x12 to 512", (8, 12), 1, 512, 64),
    Shape("one 4x12 to 1500", (4, 12), 1, 1500, 64),
    Shape("one 1x8 of 4", (1, 8), 4, 4096, 128),
    Shape("one 16x8 of 4", (16, 8), 4, 4096, 128),
    Shape("one 4x8 of 4", (4, 8), 4, 1024, 128),
    Shape("one 64x16", (64, 16), 1, 256, 64),
    Shape("one 32x32", (32, 32), 1, 2048, 80),
    Shape("one 1x32", (1, 32), 1, 2048, 128),
    Shape("one of 256", (4, 8), 2, 2048, 256),
    Shape("pool 16", (256, 8), 1, 100, 16),
    Shape("pool 64", (64, 8), 1, 197, 64),
    Shape("eight tokens", (8, 8), 8, 2048, 128),
    Shape("heads of 256", (4, 8), 1024, 1024, 256),
    Shape("heads of 192", (2, 8), 2048, 2048, 192),
    Shape("heads of 16", (32, 12), 512, 512, 16),
    Shape("heads of 160", (8, 4), 333, 333, 160),
    Shape("heads of 32", (16, 16), 400, 400, 32),
    Shape("heads of 96", (8, 8), 1000, 1000, 96),
    Shape("16x12x512", (16, 12), 512, 512, 64),
    Shape("32x12x197", (32, 12), 197, 197, 64),
    Shape("8x12x1024", (8, 12), 1024, 1024, 64),
    Shape("2x16x2048", (2, 16), 2048, 2048, 128),
    Shape("windows of 49", (2048, 4), 49, 49, 32),
    Shape("8x8192", (1, 8), 8192, 8192, 64),
)


def tile(config: Config) -> str:
    return "x".join(str(config.get(name)) for name in KNOBS)


class _Row:
    """The contenders of one shape in one mode, compiled, and what the cost model says of configurations."""

    def __init__(self, shape: Shape, mode: str, device: str) -> None:
        torch._dynamo.reset()
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        self.shape, self.options = shape, {"cache": False, "gpu_interpreter": device == "cpu"}
        self.sets = shape.inputs(torch.bfloat16 if mode == "bf16" else torch.float32, device)
        self.entries: list[Entry] = []
        self.columns: dict[str, Any] = {"name": shape.name, "mode": mode, "failed": {}, "estimates": {}}
        few = math.prod(shape.batch) * shape.rows * shape.keys < MOST_SCORES
        self.want = shape.written(*(t.double() for t in self.sets[0])).float() if few else None

    def add(self, name: str, call: Callable[..., Any], context: AbstractContextManager[Any] | None = None) -> None:
        entry = Entry(name)
        try:
            with torch.no_grad():
                prepare(entry, call, self.sets, self.want, context or nullcontext())
            self.entries.append(entry)
        except Exception as cause:
            self.columns["failed"][name] = failure(cause)

    def compiled(self) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(copy_of(self.shape.written), backend="kgen", fullgraph=True, options=self.options)

    def prepare(self) -> None:
        self.add("eager", self.shape.written)
        self.add("library", F.scaled_dot_product_attention)
        self.add("inductor", torch.compile(copy_of(self.shape.written), fullgraph=True))
        self.add("kgen", self.compiled())
        with patch.object(attention.Attention, "uncalibrated", lambda *_: None):
            self.add("calibrated", self.compiled())
            for config, parts in self.configs():
                self.add(f"{tile(config)} parts {parts}", self.compiled(), only(TEMPLATE, lambda _, c=config: c, parts=parts))

    def configs(self) -> Iterator[tuple[Config, int]]:
        """The configurations on offer with each number of parts. Their estimates are kept."""
        seen: list[Config] = []

        def pick(found: Sequence[Config]) -> Config:
            seen[:] = found
            return seen[0]

        def seconds(template: Any, problem: Problem, config: Config) -> float:
            found: float = usual(template, problem, config)
            self.columns["estimates"][f"{tile(config)} of {problem.size('b')}x{problem.size('n')}"] = found
            return found

        usual = attention.Attention.seconds
        with patch.object(attention.Attention, "seconds", seconds):
            for parts in self.shape.parts():
                with torch.no_grad(), only(TEMPLATE, pick, parts=parts):
                    self.compiled()(*self.sets[0])
        return ((config, parts) for config in list(seen) for parts in self.shape.parts())


def work(number: int, jobs: int, options: argparse.Namespace, barrier: Barrier, made: Queue[list[dict[str, Any]]]) -> None:
    """One process: prepares its share of the rows, and times them in its turn."""
    with tempfile.TemporaryDirectory() as folder:
        for variable in ("KGEN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[variable] = f"{folder}/{variable}"
        made.put(_measured(number, jobs, options, barrier))


def _measured(number: int, jobs: int, options: argparse.Namespace, barrier: Barrier) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rows = []
    for shape, mode in rows_of(options)[number::jobs]:
        rows.append(_Row(shape.shrunk(options.shrink), mode, options.device))
        rows[-1].prepare()
    found: list[dict[str, Any]] = []
    barrier.wait()
    for turn in range(jobs):
        if turn == number:
            found = [row.columns | timed(row.entries, options.seconds, options.device == "cuda") for row in rows]
        barrier.wait()
    return found


def rows_of(options: argparse.Namespace) -> list[tuple[Shape, str]]:
    shapes = [s for s in SHAPES if not options.only or any(part in s.name for part in options.only)]
    return [(shape, mode) for mode in options.modes for shape in shapes]


def show(row: dict[str, Any]) -> None:
    seconds = {name: one["seconds"] for name, one in row["results"].items()}
    named = ("eager", "library", "inductor", "kgen", "calibrated")
    configs = {name: taken for name, taken in seconds.items() if name not in named}
    best = min(configs, key=lambda name: configs[name], default="none")
    columns = "  ".join(f"{name} {seconds.get(name, math.nan) * 1e6:8.1f}" for name in named)
    print(f"{row['mode']:5} {row['name']:22} {columns}  best {configs.get(best, math.nan) * 1e6:8.1f} us: {best}")
    for name, cause in row["failed"].items():
        print(f"      {name} failed: {cause}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", help="shapes whose names contain one of these")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--jobs", type=int, default=15, help="processes that compile side by side")
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and keys by about this")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing, for each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --jobs 1 --shrink 64 tries the command out")
    jobs = min(options.jobs, len(rows_of(options)))
    spawned = multiprocessing.get_context("spawn")
    barrier, made = spawned.Barrier(jobs), spawned.Queue()
    workers = [spawned.Process(target=work, args=(k, jobs, options, barrier, made)) for k in range(jobs)]
    for one in workers:
        one.start()
    rows = [row for _ in workers for row in made.get()]
    for one in workers:
        one.join()
    for row in sorted(rows, key=lambda row: (row["mode"], row["name"])):
        show(row)
    if options.json:
        write(options.json, "attention_calibration", rows)


if __name__ == "__main__":
    main()
