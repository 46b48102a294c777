"""`kgen bisect --speed`: which graph of a script is slower than eager, which of its kernels, and what makes that faster."""

from __future__ import annotations

import argparse
import sys

from kgen.bisection.script import What, write_script
from kgen.bisection.speed import SlowKernel, TimedCall, collecting, faster_with, slowest_kernels, time_calls
from kgen.bisection.timing import SLOWER
from kgen.capture.operators import call_of, source_line
from kgen.commands.exit_codes import OK, WRONG
from kgen.commands.script import run_script
from kgen.report.graph_report import time_text

__all__ = ["run_speed"]

_KERNELS = 5  # of a graph that are listed


def run_speed(options: argparse.Namespace) -> int:
    """0 where no graph is slower than eager, 1 where one is."""
    with collecting() as seen:
        well = run_script(options.target, options.arguments)
        timed = time_calls(seen)
    if not timed:
        if well:
            print("kgen: nothing was compiled by kgen, or nothing was called", file=sys.stderr)
        return WRONG
    for number, one in enumerate(timed):
        print(f"graph {number}: {one.timing}{_role(one)}")
    slow = [one for one in timed if one.timing.is_slower]
    if not slow:
        print(f"no graph takes more than {SLOWER:.1f}x eager's time.")
        return OK if well else WRONG
    _explain(slow[0], options)
    return WRONG


def _role(one: TimedCall) -> str:
    roles = [aten.info.role for aten in one.aten]
    return f", {' and '.join(dict.fromkeys(roles))}" if roles else ", of which nothing was kept"


def _explain(one: TimedCall, options: argparse.Namespace) -> None:
    kernels = [kernel for aten in one.aten for kernel in slowest_kernels(aten)]
    kernels.sort(key=lambda kernel: kernel.timing.eager - kernel.timing.compiled)
    print("kernels of the slowest graph, each with its operators alone:")
    for kernel in kernels[:_KERNELS]:
        print(f"  {kernel.kernel.name} ({kernel.kernel.template}): {kernel.timing}")
    if not kernels or not kernels[0].timing.is_slower:
        print("no kernel is slower than its operators in eager: the time is in calls, or in what eager does")
        print("with the whole. See `kgen explain <script>` for library calls, graph breaks and the bytes that the graph moves.")
        return
    _explain_kernel(kernels[0], options)


def _explain_kernel(slow: SlowKernel, options: argparse.Namespace) -> None:
    print(f"slowest: {slow.kernel.name}")
    for node in slow.part.calls:
        print(f"  {call_of(node).operator}  {source_line(node)}")
    found = faster_with(slow)
    print("faster with:" if found else "no option that leaves out a decision makes it faster.")
    for changed, timing in found:
        print(f"  options={dict(changed)!r}: {time_text(timing.compiled)}")
    what = What(f"A kernel that takes {slow.timing.ratio:.2f}x eager's time.", options.module, "time")
    written = write_script(options.out, slow.part, slow.trial.config, slow.trial.state, what)
    print(f"script: {written.path} ({written.text})" if written.path else f"no script: {written.text}")
