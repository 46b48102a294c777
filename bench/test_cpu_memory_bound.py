"""The patterns under pytest-benchmark, one group a pattern:  pytest bench --benchmark-json=out.json

pytest-benchmark runs a contender's rounds in a block; for ratios use `python -m bench.compare`, where contenders take turns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.contenders import Job, failure, jobs

CONTENDERS = ("eager", "inductor", "kgen")
MEGABYTES = 16


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("job", jobs([], "both"), ids=lambda job: job.name)
def test_pattern(benchmark: Any, job: Job, contender: str) -> None:
    torch._dynamo.reset()
    benchmark.group = job.name
    benchmark.extra_info["fewest_bytes"] = job.fewest_bytes(MEGABYTES)
    call = job.bind(contender, job.inputs(MEGABYTES))
    try:
        call()
    except Exception as cause:
        pytest.skip(f"{contender}: {failure(cause)}")
    benchmark(call)
