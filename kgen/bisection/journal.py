"""What a process that may die was doing: a file that another one reads, and the graph that it was about."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from kgen.bisection.copies import RandomState, copied
from kgen.bisection.part import Part, made_part, part_of, units_of, values_of
from kgen.capture.packed_graph import NotPackable, packed, unpacked
from kgen.config import Config

__all__ = ["FileJournal", "Journal", "Work", "doing", "forget", "load_part", "made_up_inputs", "pack_part", "unpack_part"]

DOING, WORK = "doing", "work"


@dataclass(frozen=True, slots=True)
class Work:
    """An aten graph, and the arguments that it is called with."""

    gm: GraphModule
    config: Config
    inputs: Sequence[Any]


class Journal:
    """Notes nothing."""

    @contextmanager
    def doing(self, text: str, work: Callable[[], Work]) -> Iterator[None]:
        """What happens inside. `work` is asked where the graph is to be kept."""
        yield


@dataclass(frozen=True)
class FileJournal(Journal):
    """Keeps in a folder what is being done, as text. With `keeps`, the graph too, in sizes that are numbers."""

    folder: Path
    keeps: bool

    @contextmanager
    def doing(self, text: str, work: Callable[[], Work]) -> Iterator[None]:
        if self.keeps:
            self._keep(work())
        place, before = self.folder / DOING, doing(self.folder)
        place.write_text(text)
        try:
            yield
        finally:
            place.unlink() if before is None else place.write_text(before[0])

    def _keep(self, work: Work) -> None:
        """A graph that cannot be kept leaves no file: then the one of before is not taken for it."""
        place = self.folder / WORK
        place.unlink(missing_ok=True)
        try:
            part = part_of(work.gm, units_of(work.gm), values_of(work.gm, copied(work.inputs)))
            place.write_bytes(pickle.dumps((pack_part(part), work.config, RandomState.now())))
        except (NotPackable, RuntimeError):
            return


def doing(folder: Path) -> tuple[str, float] | None:
    """What a process was doing last, and for how many seconds; None where it is doing nothing that was noted."""
    try:
        place = folder / DOING
        return place.read_text(), time.time() - place.stat().st_mtime
    except FileNotFoundError:
        return None


def forget(folder: Path) -> None:
    """Removes what a process that has died left of what it was doing."""
    (folder / DOING).unlink(missing_ok=True)


def load_part(folder: Path) -> tuple[Part, Config, RandomState] | None:
    """The graph that was kept last."""
    place = folder / WORK
    if not place.is_file():
        return None
    data, config, state = pickle.loads(place.read_bytes())
    return unpack_part(data), config, state


def pack_part(part: Part) -> bytes:
    """A part for another process. Raises NotPackable."""
    kept = io.BytesIO()
    torch.save(list(part.inputs), kept)
    return pickle.dumps((packed(part.gm), kept.getvalue()))


def unpack_part(data: bytes) -> Part:
    graph, inputs = pickle.loads(data)
    return made_part(unpacked(graph), torch.load(io.BytesIO(inputs), weights_only=False))


def made_up_inputs(gm: GraphModule) -> list[Any]:
    """Arguments of a graph that nobody has called yet: random numbers, and zeros of integers."""
    return [_made_up(node.meta.get("val")) for node in gm.graph.nodes if node.op == "placeholder"]


def _made_up(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = [_number(n) for n in value.shape]
        floats = value.is_floating_point() or value.is_complex()
        make = torch.rand if floats and value.dtype.itemsize > 1 else torch.zeros
        return make(sizes, dtype=value.dtype, device=value.device)
    return _number(value) if isinstance(value, torch.SymInt) else value


def _number(size: Any) -> int:
    hint = getattr(getattr(size, "node", None), "hint", size)
    return int(hint) if hint is not None else 2
