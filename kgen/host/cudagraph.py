"""CUDA graphs: a graph that runs on one GPU alone is recorded at its first calls and replayed from then on.

Recording, memory pools and the order of forward and backward are torch's own: `torch._inductor.cudagraph_trees`, imported here
only, and only when a graph is first called. Static inputs (parameters) are read where they lie; all others are copied into the
recording's memory at each replay.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.host import program as hp
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["Recording", "decide", "recorded"]

Run = Callable[[list[Any]], list[Any]]

# Launches and library calls of an inference graph from which on it is recorded. A replay by torch's recorder takes the host 55
# to 70 us, a call of kgen's own 34 us for four launches, 61 for eight of one kind and 54 for ten of another (H200,
# bench/host_overhead.py). In training both passes are recorded: what a forward saves has to be in the recorder's memory, or
# each replay of its backward would copy it.
FEWEST = 10


@dataclass(frozen=True, slots=True)
class Recording:
    """How a graph is recorded: on GPU number `device`, in the pass `role` (forward, backward or inference). `static` and
    `mutated` are positions of inputs. A graph with `replays` False runs as it is, but a backward tells the recorder so."""

    device: int
    role: str
    static: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    replays: bool = True


def decide(program: hp.Program, static: frozenset[int], role: str) -> tuple[Recording | None, Verdict]:
    """The recording of a graph whose inputs `static` lie in the same place at each call; None for one that touches no GPU."""
    reason = _why_not(program, static, role)
    outcome = Outcome.RECORDED if reason is None else Outcome.NOT_RECORDED
    verdict = Verdict(f"{role} graph", "", outcome, reason or Reason.ONE_REPLAY)
    gpus = sorted({torch.device(slot.device).index for slot in program.slots if slot.device.startswith("cuda")})
    if not gpus:
        return None, verdict
    if reason is not None:
        return Recording(gpus[0], role, replays=False), verdict
    tensors = [k for k, item in enumerate(program.inputs) if isinstance(item, hp.InputTensor)]
    return Recording(gpus[0], role, tuple(k for k in tensors if k in static), _mutated(program)), verdict


def _why_not(program: hp.Program, static: frozenset[int], role: str) -> Reason | None:
    devices = {slot.device for slot in program.slots}
    if len(devices) != 1 or not devices.pop().startswith("cuda"):
        return Reason.NOT_ONE_GPU
    launches = sum(map(_launches, program.code))
    if launches == 0:
        return Reason.NOTHING_RUNS
    for item in hp.each(program.code):
        if isinstance(item, hp.PythonCall | hp.BindSize) or (isinstance(item, hp.Extern) and item.registers):
            return Reason.HOST_DECIDES
    if not static.issuperset(_mutated(program)):
        return Reason.MUTATED_INPUT
    return None if launches >= FEWEST or role != "inference" else Reason.FEW_LAUNCHES


def _launches(item: hp.Instruction) -> bool:
    """Whether an instruction launches one kernel, or calls the library once."""
    return isinstance(item, hp.Launch | hp.Extern) or (isinstance(item, hp.Pick) and any(map(_launches, item.items)))


def _mutated(program: hp.Program) -> tuple[int, ...]:
    return tuple(k for k, item in enumerate(program.inputs) if isinstance(item, hp.InputTensor) and item.mutated)


def recorded(run: Run, recording: Recording, constants: Sequence[torch.Tensor], program: hp.Program) -> Run:
    """`run`, which runs `program`, as a callable that records and replays it. Each thread has its own recordings."""
    own = threading.local()

    def call(args: list[Any]) -> list[Any]:
        made: Run | None = getattr(own, "run", None)
        if made is None:
            made = own.run = _record(run, recording, constants, program, args)
        return made(args)

    def announce(args: list[Any]) -> list[Any]:
        manager = _trees().get_manager(recording.device, create_if_none_exists=False)
        if manager is not None:  # a forward was recorded: its results may be overwritten from now on
            manager.set_to_running_backward()
        return run(args)

    if recording.replays:
        return call
    return announce if recording.role == "backward" else run


def _record(run: Run, recording: Recording, constants: Sequence[torch.Tensor], program: hp.Program, args: list[Any]) -> Run:
    info = importlib.import_module("torch._inductor.cudagraph_utils").PlaceholderInfo
    made: Run = _trees().cudagraphify_impl(
        run,
        args,
        recording.static,
        device_index=recording.device,
        is_backward=recording.role == "backward",
        is_inference=recording.role == "inference",
        stack_traces=[None] * len(program.outputs),  # for messages about results that a replay has overwritten
        constants=tuple(constants),
        placeholders=tuple(info(f"input {k}", None, [], None) for k in range(len(program.inputs))),
        mutated_input_idxs=recording.mutated,
        compile_id=None,
    )
    return made


def _trees() -> Any:
    return importlib.import_module("torch._inductor.cudagraph_trees")
