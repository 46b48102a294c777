"""Runs a program until kgen computes one of its graphs wrongly, and finds the smallest part of that graph which is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from torch.fx import GraphModule, Node

from kgen import config as configuration
from kgen.backend import replace_random
from kgen.bisection.compare import first_difference, run_eagerly
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.journal import Journal, Work, made_up_inputs
from kgen.bisection.part import Part, Unit, part_of, units_of, values_of
from kgen.bisection.shrink import Shrinker
from kgen.bisection.trial import Trial, Wrong, error_text, fresh, trial_config
from kgen.capture.aot_cache import CompiledGraph, NotSerializable
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.torch_adapter import GraphInfo, output_strides
from kgen.config import Config
from kgen.failures import NOT_OURS
from kgen.watch import Compile, watched

__all__ = ["Found", "Seen", "Smallest", "WrongGraph", "smallest", "smallest_part", "watching"]


@dataclass(frozen=True, slots=True)
class WrongGraph:
    """An aten graph that kgen computes wrongly, with the arguments of a call that shows it."""

    gm: GraphModule
    info: GraphInfo
    config: Config
    inputs: tuple[Any, ...]
    state: RandomState
    wrong: Wrong


class Found(BaseException):
    """Ends the program at the first wrong graph. No `except Exception` of the program's may catch it."""

    def __init__(self, graph: WrongGraph) -> None:
        super().__init__(graph.wrong.text)
        self.graph = graph


@dataclass(slots=True)
class Seen:
    """What has been looked at: graphs, and their calls."""

    graphs: int = 0
    calls: int = 0


@contextmanager
def watching(journal: Journal | None = None) -> Iterator[Seen]:
    """Every call of a compiled graph is repeated in eager. Raises Found, from the call, at the first that is wrong. `journal`
    hears what is being done, before it may end the process."""
    seen, journal = Seen(), journal or Journal()

    def watch(gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile) -> CompiledGraph:
        seen.graphs += 1
        aten = replace_random(fresh(gm), info, config)
        try:
            with journal.doing(f"compiling {info.name}", lambda: Work(aten, config, made_up_inputs(aten))):
                compiled = compile_graph(gm, info, config)
        except NOT_OURS:
            raise
        except Exception as cause:  # noqa: BLE001  of any stage
            return _Broken(aten, info, config, cause)
        return _Watched(aten, info, config, compiled, seen, journal)

    with configuration.insist(cache=False, strict=True, tuning="before"), watched(watch):
        yield seen


@dataclass
class _Watched:
    """A compiled graph, each call of which is compared with eager."""

    gm: GraphModule
    info: GraphInfo
    config: Config
    compiled: CompiledGraph
    seen: Seen
    journal: Journal
    output_strides: Any = field(init=False)
    coverage: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.output_strides, self.coverage = self.compiled.output_strides, self.compiled.coverage

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        self.seen.calls += 1
        before, state, given = copied(args), RandomState.now(), list(args)
        try:
            with self.journal.doing(f"in a call of {self.info.name}", lambda: Work(self.gm, self.config, before)):
                got = self.compiled(args)
            text, error = self._difference(before, state, [*got, *given]), ""
        except NOT_OURS:
            raise
        except Exception as cause:  # noqa: BLE001  of a kernel, or of its launch
            text, error = error_text(cause), type(cause).__name__
        if text:
            raise Found(WrongGraph(self.gm, self.info, self.config, tuple(before), state, Wrong(text, error)))
        return got

    def _difference(self, before: Sequence[Any], state: RandomState, got: Sequence[Any]) -> str:
        after, given = RandomState.now(), copied(before)
        state.restore()
        eager = [*run_eagerly(self.gm, given), *given]
        after.restore()
        return first_difference(self.gm, before, got, eager, state)

    def serialize(self) -> bytes:
        raise NotSerializable("its calls are watched")

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        raise NotSerializable("its calls are watched")


class _Broken(EagerGraph):
    """A graph that could not be compiled: its first call has the arguments to show that with."""

    def __init__(self, gm: GraphModule, info: GraphInfo, config: Config, cause: Exception) -> None:
        super().__init__(gm, output_strides(gm))
        self.graph = (info, config, Wrong(error_text(cause), type(cause).__name__))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        info, config, wrong = self.graph
        raise Found(WrongGraph(self.gm, info, config, tuple(copied(args)), RandomState.now(), wrong))


# ---- the smallest part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Smallest:
    """The part, what is wrong with it, of how many operators it is, and how many trials found it."""

    part: Part
    wrong: Wrong
    operators: int
    trials: int


def smallest_part(
    graph: WrongGraph, trials: int, progress: Callable[[int, int], None] = lambda _number, _size: None
) -> Smallest | None:
    """The smallest part of a graph that is wrong by itself; None where the graph is wrong as a whole only, with the sizes,
    strides and options of this call alone: then the fault needs symbolic sizes, frozen weights or a recorded graph.

    `progress` hears of each trial: its number, and how many operators it has."""
    graph.state.restore()
    values = values_of(graph.gm, copied(graph.inputs))
    return smallest(graph.gm, values, graph.wrong, Trial(trial_config(graph.config), graph.state), trials, progress)


class Tries(Protocol):
    """Says what is wrong with a part, if anything is."""

    def wrong(self, part: Part, /) -> Wrong | None: ...


def smallest(
    gm: GraphModule, values: Mapping[Node, Any], wrong: Wrong, trial: Tries, trials: int, progress: Callable[[int, int], None]
) -> Smallest | None:
    """The smallest part of a graph with a fault like `wrong`; `values` are those of its nodes."""

    def shows(units: Sequence[Unit]) -> bool:
        progress(shrinker.count, len(units))
        found = trial.wrong(part_of(gm, units, values))
        return found is not None and found.is_like(wrong)

    shrinker: Shrinker[Unit] = Shrinker(shows, trials)
    units = units_of(gm)
    if not shows(units):
        return None
    part = part_of(gm, shrinker.smallest(units), values)
    last = trial.wrong(part)
    return None if last is None else Smallest(part, last, len(units), shrinker.count + 1)
