"""Calls recorded as one CUDA graph, to be timed without the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

EMPTY = "CUDA Graph is empty"


@dataclass(frozen=True)
class Recorded:
    """What was recorded reads memory by address: `run` lives as long as this, and with it the tensors of its own that it reads
    (a mask's table of blocks, packed weights). Else others would be given their memory."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def graph_of_calls(run: Callable[[], None]) -> Recorded:
    """What replays all that `run` launches. Raises RuntimeError where that cannot be recorded, or nothing was: what is launched
    on another stream than torch's is not there, and replaying it would take no time.

    torch only warns of an empty graph. It does so too when recording has failed, where the error says it already."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            run()
    if any(EMPTY in str(warning.message) for warning in caught):
        raise RuntimeError("nothing was recorded: it runs on a stream of its own")
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return Recorded(graph, run)
