"""Tuning beside a running program: the option ``tuning="background"``.

A graph runs at once, with the kernels that the default mode chooses. Its first call asks for better ones: another process
compiles the same graph in a max-autotune mode, which measures candidates and adds the winners to the tuning file. Then a thread
compiles the graph again by that file, and the new one takes the old one's place between two calls (docs/tuning.md).
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import logging
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from torch.fx import GraphModule

from kgen import cache, only
from kgen.build import child
from kgen.capture.aot_cache import CompiledGraph, NotSerializable, Strides
from kgen.capture.packed_graph import NotPackable, packed, unpacked
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.counters import counters
from kgen.tuning.benchmark import Setting
from kgen.tuning.store import stores
from kgen.tuning.tuner import UNANSWERED
from kgen.verdict import DEMANDS

__all__ = ["Improving", "Job", "improving", "serve", "wait_for_tuning"]

LOG = logging.getLogger("kgen.tuning")

# What runs in the other process, the seconds in which it starts, and those that it has beyond the ones for measuring, for it
# compiles; and how it gives way to the program that waits for it.
CHILD = "kgen.background"
START_LIMIT, MORE_SECONDS = 120.0, 600.0
NICE = 5
MEASURED = "max-autotune-no-cudagraphs"

Compile = Callable[[GraphModule, GraphInfo, Config], CompiledGraph]


@dataclass(frozen=True)
class Job:
    """A graph before the stages, to be compiled in another process, and in this one once more. `compile_graph` is a function
    that both find under its name."""

    graph: bytes
    info: GraphInfo
    config: Config
    setting: Setting
    compile_graph: Compile

    def compiled(self) -> CompiledGraph:
        return self.compile_graph(unpacked(self.graph), self.info, self.config)

    def measuring(self) -> Job:
        """As the other process compiles it."""
        return replace(self, config=replace(self.config, mode=MEASURED, tuning="before"))

    def measured(self) -> Job:
        """As this process compiles it after that: by what is known alone."""
        return replace(self, config=replace(self.config, mode=MEASURED, tuning="before", tuning_seconds=0.0))


class Follower(Protocol):
    """Who calls a graph, and changes over to another one."""

    def __call__(self, graph: CompiledGraph, *, is_final: bool) -> None: ...


class Improving:
    """A compiled graph that is replaced by a better one, once. The first call asks for it."""

    def __init__(self, graph: CompiledGraph, job: Job) -> None:
        self.graph, self.job = graph, job
        self.output_strides: Strides = graph.output_strides
        self.coverage: Mapping[str, int] = graph.coverage
        self.known = stores(job.config).fingerprint()
        self.context = contextvars.copy_context()
        self.follower: Follower | None = None
        self.asking, self.asked = threading.Lock(), False

    def follow(self, follower: Follower) -> None:
        """`follower` is told which graph to call from now on."""
        self.follower = follower

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        assert self.follower is not None
        self.follower(self.graph, is_final=False)
        with self.asking:
            first, self.asked = not self.asked, True
        if first:
            _thread().put(self)
        return self.graph(args)

    def improve(self, ask: Callable[[Job], Mapping[str, Any]]) -> None:
        """Has candidates measured, and lets a better graph take over."""
        reply = ask(self.job.measuring())
        if "failed" in reply:
            _left("failed", self.job, reply["failed"])
        elif stores(self.job.config).fingerprint() == self.known:
            _left("unchanged", self.job, "nothing was measured")
        else:
            self._take_over(self.context.run(self.job.measured().compiled))

    def _take_over(self, better: CompiledGraph) -> None:
        if better.output_strides != self.output_strides:  # backward is compiled for the strides of what forward saves
            _left("refused", self.job, "its results would have other strides")
            return
        assert self.follower is not None
        self.follower(better, is_final=True)
        counters.add("background.tuned")
        LOG.info("%s runs by measured choices from now on", self.job.info.name)

    def serialize(self) -> bytes:
        """Raises NotSerializable: another process would get the graph as it is, and not tune it."""
        raise NotSerializable("it is being tuned")

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        raise NotImplementedError


def improving(gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile) -> CompiledGraph:
    """The graph, compiled by what is known; one that improves, where there is something to measure."""
    job = _job(gm, info, config, compile_graph)
    unanswered: set[Any] = set()
    token = UNANSWERED.set(unanswered)
    try:
        made = compile_graph(gm, info, config)
    finally:
        UNANSWERED.reset(token)
    return made if job is None or not unanswered else Improving(made, job)


def _job(gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile) -> Job | None:
    """None where the graph is compiled for one purpose (a demanded fusion, one template), or cannot be packed."""
    if DEMANDS.get() or only.current() is not None:
        return None
    try:
        return Job(packed(gm), replace(info, shape_env=None), config, Setting.here(config), compile_graph)
    except NotPackable as cause:
        counters.add("background.refused")
        LOG.info("%s is not tuned in the background: %s", info.name, cause)
        return None


def _left(why: str, job: Job, text: str) -> None:
    counters.add(f"background.{why}")
    LOG.info("%s stays as it is: %s", job.info.name, text)


# ---- the thread, and its process ------------------------------------------------------------------------------------------


def wait_for_tuning(timeout: float | None = None) -> bool:
    """Waits until all graphs that were called have been tuned (option ``tuning="background"``), at most `timeout` seconds.
    Whether that is so."""
    return not _threads or _threads[0].owner != os.getpid() or _threads[0].wait(timeout)


class _Thread:
    """Takes one graph after the other, in the order of their first calls."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.waiting: queue.Queue[Improving] = queue.Queue()
        self.open, self.changed = 0, threading.Condition()
        self.worker: child.Worker | None = None
        threading.Thread(target=self._run, daemon=True, name="kgen-background").start()

    def put(self, graph: Improving) -> None:
        with self.changed:
            self.open += 1
        self.waiting.put(graph)

    def wait(self, timeout: float | None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not self.open, timeout)

    def _run(self) -> None:
        while True:
            graph = self.waiting.get()
            try:
                graph.improve(self.ask)
            except Exception as cause:  # noqa: BLE001  the program runs on with what it has
                _left("failed", graph.job, f"{type(cause).__name__}: {cause}")
            with self.changed:
                self.open -= 1
                last = not self.open
                self.changed.notify_all()
            if last:
                self.stop()  # it may hold a context on the GPU

    def ask(self, job: Job) -> Mapping[str, Any]:
        """What the other process answers: {} where it has measured, else why it has not."""
        with cache.scratch("background") as folder:
            place = folder / "job"
            place.write_bytes(pickle.dumps(job))
            try:
                self.worker = self.worker or child.Worker(CHILD, START_LIMIT)
                self.worker.ask(str(place))
                return self.worker.reply(job.config.tuning_seconds + MORE_SECONDS)
            except (child.Ended, child.Late) as end:
                self.stop()
                return {"failed": f"no answer after {end} s" if isinstance(end, child.Late) else str(end)}

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


_threads: list[_Thread] = []
_starting = threading.Lock()


def _thread() -> _Thread:
    """That of this process: a fork has none."""
    with _starting:
        if _threads and _threads[0].owner != os.getpid():
            _threads.clear()
        if not _threads:
            _threads.append(_Thread())
        return _threads[0]


@atexit.register
def _stop() -> None:
    for one in _threads:
        if one.owner == os.getpid():
            with contextlib.suppress(OSError):
                one.stop()


# ---- the other process ----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Replies to each line, the path of a job, with a line. Ends with its parent."""
    os.nice(NICE)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # bars and warnings are for those who wait
        os.dup2(silence, descriptor)
    paths: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(paths,), daemon=True).start()
    replies.write("{}\n")  # it has started
    while True:
        replies.write(json.dumps(reply_to(Path(paths.get()))) + "\n")


def _listen(paths: queue.Queue[str]) -> None:
    for line in sys.stdin:
        paths.put(line.strip())
    os._exit(0)  # whoever asked is gone


def reply_to(path: Path) -> dict[str, Any]:
    """Compiles the graph of a job, which measures what is not known."""
    try:
        job: Job = pickle.loads(path.read_bytes())
        with job.setting.applied():
            job.compiled()
    except Exception as cause:  # noqa: BLE001  the other process wants to know
        return {"failed": f"{type(cause).__name__}: {cause}"[:2000]}
    return {}
