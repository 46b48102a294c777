"""What was compiled, kept for whoever asks while it happens: `kgen.explain`, the command line, tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from kgen.build.unit import UnitPlan
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.host.compiled import Blueprint
from kgen.ir.plan import Schedule
from kgen.scheduler.options import Options

__all__ = ["RECORDERS", "EagerRecord", "Record", "Recorder", "record", "record_eager", "recording"]


@dataclass(frozen=True, slots=True)
class Record:
    """One compiled graph and what each stage made of it. `options` are what its kernels were decided with."""

    info: GraphInfo
    plan: Schedule
    units: UnitPlan
    blueprint: Blueprint
    config: Config
    options: Options


@dataclass(frozen=True, slots=True)
class EagerRecord:
    """A graph that runs in eager node by node: by `fallback="all"`, or because it could not be compiled. `coverage` counts its
    operators as ``extern.<name>``."""

    info: GraphInfo
    coverage: Mapping[str, int]


@dataclass(slots=True, eq=False)
class Recorder:
    """Collects the graphs that are compiled while it is open, in order."""

    graphs: list[Record | EagerRecord] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)

    def hears(self, config: Config) -> bool:
        """Whether a compilation belongs to this recorder. A backward may be compiled in a thread of autograd's, which has no
        context of ours: the `Config` object that it shares with its forward tells."""
        return self in _listening.get() or any(config is known for known in self.configs)


_listening: ContextVar[tuple[Recorder, ...]] = ContextVar("kgen_recorders", default=())
RECORDERS: list[Recorder] = []  # those that are open
_lock = threading.Lock()


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records the compilations started inside. Nests: an inner recording does not hide graphs from an outer one."""
    recorder = Recorder()
    token = _listening.set((*_listening.get(), recorder))
    with _lock:
        RECORDERS.append(recorder)
    try:
        yield recorder
    finally:
        with _lock:
            RECORDERS.remove(recorder)
        _listening.reset(token)


def record(made: Record) -> Record:
    """Notes one compiled graph for every open recorder."""
    _note(made, made.config)
    return made


def record_eager(info: GraphInfo, coverage: Mapping[str, int], config: Config) -> None:
    """Notes a graph that runs in eager."""
    _note(EagerRecord(info, dict(coverage)), config)


def _note(made: Record | EagerRecord, config: Config) -> None:
    with _lock:
        for recorder in RECORDERS:
            if recorder.hears(config):
                recorder.graphs.append(made)
                recorder.configs.append(config)
