"""When each part of a cold compile on a GPU begins and ends: stages, waits for kernels, and what each kernel takes.

python -m bench.cold_timeline vit dit resnet50 --train

A process for each model, with empty caches; CPU seconds are those of the process, without its children.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import cache_environment
from kgen import backend
from tests.models.catalogue import MODELS
from tests.models.check import Subject, run


class Timeline:
    """What is wrapped, each with wall seconds since the start and the process's CPU seconds."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.cpu = time.process_time()

    def say(self, what: str) -> None:
        print(f"  {time.perf_counter() - self.start:7.2f} {time.process_time() - self.cpu:7.2f} {what}", flush=True)

    def wrap(self, holder: Any, name: str) -> None:
        setattr(holder, name, self.timed(getattr(holder, name), name))

    def timed(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            started, cpu = time.perf_counter(), time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                if took > 0.05:
                    self.say(f"end {name}: {took:.2f} wall, {time.process_time() - cpu:.2f} cpu")

        outer.__name__ = name
        return outer


def measure(name: str, which: str, train: bool) -> None:
    subject = Subject(MODELS[name], "base", torch.bfloat16, "cuda")
    arguments = subject.arguments()
    run(subject.eager, subject.eager, arguments, train, subject.autocast())
    torch.cuda.synchronize()
    kernels: list[tuple[float, float, str]] = []
    clock = Timeline()
    if which == "kgen":
        watch(clock, kernels)
    compiled = torch.compile(subject.ours, backend=which)
    run(compiled, subject.ours, arguments, train, subject.autocast())
    torch.cuda.synchronize()
    clock.say("all")
    if kernels:
        print(
            f"  {len(kernels)} kernels, {sum(took for _, took, _ in kernels):.1f} s, distinct names "
            f"{len(Counter(one for _, _, one in kernels))}; last ten to end, with their seconds:"
        )
        for ended, took, one in sorted(kernels)[-10:]:
            print(f"    {ended:7.2f} {took:5.2f} {one}")
        for ended, took, one in sorted(kernels, key=lambda k: -k[1])[:10]:
            print(f"    longest {ended:7.2f} {took:5.2f} {one}")


def watch(clock: Timeline, kernels: list[tuple[float, float, str]]) -> None:
    from kgen.build import cpp, triton
    from kgen.host import compiled

    backend.STAGES = tuple(clock.timed(stage, stage.__name__) for stage in backend.STAGES)
    for name in ("laid_out", "split_sums", "recomputed_scores", "rewrite"):
        clock.wrap(backend, name)
    clock.wrap(backend.Passes, "before_partitioning")
    clock.wrap(backend.torch_adapter, "capture")
    clock.wrap(cpp, "build_units")
    clock.wrap(cpp, "runtime_library")
    clock.wrap(triton, "compile_kernels")
    clock.wrap(compiled, "check_spills")
    clock.wrap(compiled, "load_kernel")
    clock.wrap(compiled, "load")
    build = triton._build

    def timed(key: str, kernel: Any, arch: int) -> bytes:
        started = time.perf_counter()
        made = build(key, kernel, arch)
        ended = time.perf_counter()
        kernels.append((ended - clock.start, ended - started, kernel.name))
        return made

    triton._build = timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--backends", nargs="+", default=["kgen"])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.models[0], options.backends[0], options.train)
        return 0
    for model in options.models:
        for which in options.backends:
            with tempfile.TemporaryDirectory(prefix="kgen-cold-") as folder:
                print(f"{model} {which}: wall, cpu", flush=True)
                command = [sys.executable, "-m", "bench.cold_timeline", model, "--backends", which, "--one"]
                command += ["--train"] if options.train else []
                subprocess.run(command, env={**os.environ, **cache_environment(folder)}, check=False, timeout=240)
    return 0


if __name__ == "__main__":
    sys.exit(main())
