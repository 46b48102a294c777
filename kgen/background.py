"""Tuning beside a running program: the option ``tuning="background"``.

A graph runs at once, with the kernels that the default mode chooses. When its first call has answered, and nothing is compiled
any more, another process compiles the same graph in a max-autotune mode, which measures candidates and adds the winners to the
tuning file. This process loads what the other one has made, and the new graph takes the old one's place between two calls
(docs/tuning.md). The cache keeps that the graph was tuned: a later process begins with the better one.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

from torch.fx import GraphModule

from kgen import cache, only, watch
from kgen.build import child
from kgen.capture.aot_cache import CompiledGraph, NotSerializable, Strides, entry_tag
from kgen.capture.packed_graph import NotPackable, packed, signature, unpacked
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config, code_key
from kgen.counters import counters
from kgen.report.record import RECORDERS
from kgen.tuning.benchmark import Setting
from kgen.tuning.entry import Key
from kgen.tuning.tuner import ASKED
from kgen.verdict import DEMANDS

__all__ = ["Improving", "Job", "improving", "serve", "wait_for_tuning"]

LOG = logging.getLogger("kgen.tuning")

# What runs in the other process, the seconds in which it starts, and those that it has beyond the ones for measuring, for it
# compiles; and how it gives way to the program that waits for it.
CHILD = "kgen.background"
START_LIMIT, MORE_SECONDS = 120.0, 600.0
NICE = 10
# Seconds without a graph that is compiled or called for the first time, before one is tuned: a program that starts has use for
# all cores.
QUIET = 0.5
MEASURED = "max-autotune-no-cudagraphs"
# The cache's kind of what is known of tuned graphs.
KIND = "background"

Compile = Callable[[GraphModule, GraphInfo, Config], CompiledGraph]


@dataclass(frozen=True)
class Job:
    """A graph before the stages, to be compiled in another process, and in this one where that cannot hand over what it made.
    `compile_graph` is a function that both find under its name. `key` is the graph's in the cache."""

    key: str
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
    """A compiled graph that is replaced by a better one, once. The first call that has answered asks for it."""

    def __init__(self, graph: CompiledGraph, job: Job, is_traced: Callable[[], bool]) -> None:
        self.graph, self.job, self.is_traced = graph, job, is_traced
        self.output_strides: Strides = graph.output_strides
        self.coverage: Mapping[str, int] = graph.coverage
        self.context = contextvars.copy_context()
        self.follower: Follower | None = None
        self.asking, self.asked = threading.Lock(), False

    def follow(self, follower: Follower) -> None:
        """`follower` is told which graph to call from now on."""
        self.follower = follower

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        results = self.graph(args)
        with self.asking:
            first, self.asked = not self.asked, True
        if first:
            assert self.follower is not None
            self.follower(self.graph, is_final=False)
            BUSY.note()
            _thread().put(self)
        return results

    def improve(self, ask: Callable[[Job], Mapping[str, Any]]) -> None:
        """Has candidates measured, and lets a better graph take over."""
        reply = ask(self.job.measuring())
        if "failed" in reply:
            _left("failed", self.job, reply["failed"])
        elif not reply.get("answered"):
            _left("unchanged", self.job, "nothing was measured")
        elif "graph" not in reply or self._is_watched():
            self._take_over(self.context.run(self.job.measured().compiled))
        elif reply["graph"] == _serialized(self.graph):
            _left("unchanged", self.job, "its choices were the best")
        else:
            self._take_over(_loaded(reply["graph"], self.job))

    def _is_watched(self) -> bool:
        """Whether somebody wants to know what is compiled in this process."""
        return self.job.config.debug is not None or watch.GRAPHS.watch is not None or bool(RECORDERS) or self.is_traced()

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


def improving(
    gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile, is_traced: Callable[[], bool]
) -> CompiledGraph:
    """The graph, compiled by what is known; one that improves, where there is something to measure and nobody has done that.
    `is_traced` says whether somebody keeps the trace of what is compiled."""
    with BUSY.working():
        job = _job(gm, info, config, compile_graph)
        if job is None:
            return compile_graph(gm, info, config)
        known = _tuned(job)
        if known is not None:
            made, asked = _asking(job.measured().compiled)
            if _unanswered(asked) <= known:
                counters.add("background.known")
                return made
        made, asked = _asking(lambda: compile_graph(gm, info, config))
        return Improving(made, job, is_traced) if asked else made


def _asking(compiled: Callable[[], CompiledGraph]) -> tuple[CompiledGraph, Mapping[Key, bool]]:
    """A compiled graph, and what was asked of measurements meanwhile."""
    asked: dict[Key, bool] = {}
    token = ASKED.set(asked)
    try:
        return compiled(), asked
    finally:
        ASKED.reset(token)


class _Busy:
    """Whether graphs are compiled, or called for the first time, and when that was last so."""

    def __init__(self) -> None:
        self.graphs, self.last, self.lock = 0, time.monotonic(), threading.Lock()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def note(self) -> None:
        self._count(0)

    def _count(self, more: int) -> None:
        with self.lock:
            self.graphs += more
            self.last = time.monotonic()

    def wait(self) -> None:
        """Until it was not so for a while."""
        while True:
            with self.lock:
                left = self.last + QUIET - time.monotonic()
                left = max(left, QUIET / 4) if self.graphs else left
            if left <= 0:
                return
            time.sleep(left)


BUSY = _Busy()


def _unlock() -> None:
    """In a fork, which may find it held, and compiles nothing yet."""
    BUSY.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_unlock)


def _job(gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile) -> Job | None:
    """None where the graph is compiled for one purpose (a demanded fusion, one template), or cannot be packed."""
    if DEMANDS.get() or only.current() is not None:
        return None
    try:
        graph, setting = packed(gm), Setting.here(config)
        key = entry_tag(
            (signature(gm), info.role, code_key(config), setting.threads, setting.allow_tf32, setting.allow_tf32_windows)
        )
        return Job(key, graph, replace(info, shape_env=None), config, setting, compile_graph)
    except NotPackable as cause:
        counters.add("background.refused")
        LOG.info("%s is not tuned in the background: %s", info.name, cause)
        return None


def _left(why: str, job: Job, text: str) -> None:
    counters.add(f"background.{why}")
    LOG.info("%s stays as it is: %s", job.info.name, text)


# ---- what the cache knows of graphs ---------------------------------------------------------------------------------------


def _tuned(job: Job) -> frozenset[str] | None:
    """What no measurement could answer when the graph was tuned; None where it was not."""
    found = cache.get(KIND, job.key)
    return None if found is None else frozenset(json.loads(found))


def _note_tuned(job: Job, asked: Mapping[Key, bool]) -> None:
    cache.put(KIND, job.key, json.dumps(sorted(_unanswered(asked))).encode())


def _unanswered(asked: Mapping[Key, bool]) -> frozenset[str]:
    return frozenset(cache.stable_hash(key) for key, answered in asked.items() if not answered)


# ---- graphs from the other process ----------------------------------------------------------------------------------------


def _serialized(graph: CompiledGraph) -> bytes | None:
    """What `_loaded` makes the graph of; None where only the process that compiled it can run it."""
    try:
        return pickle.dumps((type(graph), graph.serialize(), graph.output_strides))
    except NotSerializable:
        return None


def _loaded(data: bytes, job: Job) -> CompiledGraph:
    kind, graph, strides = pickle.loads(data)
    with job.setting.toolchain():
        made: CompiledGraph = kind.deserialize(graph)
    made.output_strides = strides
    return made


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
            BUSY.wait()
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
        """What the other process answers (`reply_to`), with the graph that it made."""
        with cache.scratch("background") as folder:
            place = folder / "job"
            place.write_bytes(pickle.dumps(job))
            try:
                self.worker = self.worker or child.Worker(CHILD, START_LIMIT)
                self.worker.ask(str(place))
                reply = self.worker.reply(job.config.tuning_seconds + MORE_SECONDS)
                made = _result(place)
                return {**reply, "graph": made.read_bytes()} if made.exists() else reply
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
    """Compiles the graph of a job, which measures what is not known. How many questions have an answer by then; the graph is
    beside the job."""
    try:
        job: Job = pickle.loads(path.read_bytes())
        with job.setting.applied():
            late = counters["tuning.no_time"]
            made, asked = _asking(job.compiled)
            data = _serialized(made)
            if data is not None:
                _result(path).write_bytes(data)
            if counters["tuning.no_time"] == late:
                _note_tuned(job, asked)
    except Exception as cause:  # noqa: BLE001  the other process wants to know
        return {"failed": f"{type(cause).__name__}: {cause}"[:2000]}
    return {"answered": sum(asked.values())}


def _result(job: Path) -> Path:
    return job.with_name("graph")
