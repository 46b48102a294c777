"""The process that tunes graphs for another one, which runs them meanwhile (`kgen/background.py`)."""

from __future__ import annotations

import json
import os
import pickle
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from kgen.backend import compile_again
from kgen.background import Job
from kgen.capture.packed_graph import unpacked

__all__ = ["serve"]

# It gives way to the program that waits for it.
NICE = 5


def serve() -> None:
    """Answers one line for each line, the path of a job. Ends with its parent."""
    os.nice(NICE)
    replies = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # bars and warnings are for those who wait
        os.dup2(silence, descriptor)
    paths: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(paths,), daemon=True).start()
    while True:
        replies.write(json.dumps(reply_to(Path(paths.get()))) + "\n")
        replies.flush()


def _listen(paths: queue.Queue[str]) -> None:
    for line in sys.stdin:
        paths.put(line.strip())
    os._exit(0)  # whoever asked is gone


def reply_to(path: Path) -> dict[str, Any]:
    """Compiles the graph of a job, which measures what is not known."""
    try:
        job: Job = pickle.loads(path.read_bytes())
        torch.set_num_threads(job.threads)
        compile_again(unpacked(job.graph), job.info, job.config)
    except Exception as cause:  # noqa: BLE001  the other process wants to know
        return {"failed": f"{type(cause).__name__}: {cause}"[:2000]}
    return {}
