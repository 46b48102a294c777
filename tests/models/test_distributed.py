"""Two processes, over gloo or on two GPUs: a compiled model trains as in eager under DDP, FSDP2 and tensor parallelism, and
with collectives of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH, PROCESSES = 3, 16, 2
Compile = Callable[[Any], Any]
# Gives a module with the parameters, and what is called in its place.
Setup = Callable[[Compile], tuple[nn.Module, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def replicated(compiled: Compile) -> tuple[nn.Module, Any]:
    """Buckets are smaller than the model, so that Dynamo splits its graph."""
    module = DistributedDataParallel(Model(), bucket_cap_mb=2)
    return module, compiled(module)


def replicated_later(compiled: Compile) -> tuple[nn.Module, Any]:
    module = DistributedDataParallel(compiled(Model()))
    return module, module


def sharded(compiled: Compile, **policy: Any) -> tuple[nn.Module, Any]:
    module = Model()
    for block in module.blocks:
        fully_shard(block, **policy)
    fully_shard(module, **policy)
    return module, compiled(module)


def sharded_in_bfloat16(compiled: Compile) -> tuple[nn.Module, Any]:
    return sharded(compiled, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def sharded_blocks(compiled: Compile) -> tuple[nn.Module, Any]:
    module = Model()
    for block in module.blocks:
        block.forward = compiled(block.forward)
        fully_shard(block)
    fully_shard(module)
    return module, module


def tensor_parallel(compiled: Compile) -> tuple[nn.Module, Any]:
    mesh = dist.init_device_mesh(torch.get_default_device().type, (PROCESSES,))
    module = Model()
    for block in module.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module, compiled(module)


def with_collectives(compiled: Compile) -> tuple[nn.Module, Any]:
    module = nn.Linear(WIDTH, WIDTH)

    def call(x: Tensor) -> Tensor:
        group = dist.group.WORLD
        everywhere = collectives.all_gather_tensor_autograd(module(x).relu(), 0, group)
        part = collectives.reduce_scatter_tensor_autograd(everywhere.sin(), "sum", 0, group)
        with torch.no_grad():
            total = x.sin()
            dist.all_reduce(total)
            gathered = [torch.empty_like(total) for _ in range(PROCESSES)]
            dist.all_gather(gathered, total + 1)
        return part * 2 + gathered[1]  # type: ignore[no-any-return]

    return module, compiled(call)


SETUPS: dict[str, Setup] = {
    "ddp": replicated,
    "ddp around": replicated_later,
    "fsdp": sharded,
    "fsdp of blocks": sharded_blocks,
    "fsdp in bfloat16": sharded_in_bfloat16,
    "tensor parallel": tensor_parallel,
    "collectives": with_collectives,
}


def trained(setup: Setup, compiled: Compile, rank: int) -> list[Tensor]:
    """The losses of some steps, and the parameters after them."""
    torch.manual_seed(0)
    module, call = setup(compiled)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)  # tensor parallelism mixes kinds of tensors
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        numbers = torch.randn(4, 7, WIDTH, generator=generator, device="cpu")
        loss = (call(numbers.to(torch.get_default_device())) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(whole(one.detach()) for one in module.parameters())]


def whole(value: Any) -> Tensor:
    """The tensor of which a process may hold a part."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def compare(rank: int, folder: str, kind: str, backend: str) -> None:
    """What a process runs: on a CPU, or on the GPU of its rank."""
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(f"{kind}:{rank}" if kind == "cuda" else kind)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    for name, setup in SETUPS.items():
        torch._dynamo.reset()
        expected = trained(setup, lambda function: function, rank)
        strict = {"strict": True, "cache": False}
        found = trained(setup, lambda function, s=strict: torch.compile(function, backend="kgen", options=s), rank)
        tolerance = 1e-3 if "bfloat16" in name else 1e-5
        torch.testing.assert_close(
            found, expected, rtol=10 * tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
        Path(folder, f"{name} {rank}").touch()
    dist.destroy_process_group()


def train_together(folder: Path, kind: str, backend: str) -> None:
    mp.spawn(compare, (str(folder), kind, backend), nprocs=PROCESSES)
    assert {path.name for path in folder.iterdir()} >= {f"{name} {rank}" for name in SETUPS for rank in range(PROCESSES)}


@pytest.mark.cpu
@pytest.mark.slow
def test_two_processes_train_as_in_eager(tmp_path: Path) -> None:
    train_together(tmp_path, "cpu", "gloo")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")
def test_two_gpus_train_as_in_eager(tmp_path: Path) -> None:
    train_together(tmp_path, "cuda", "nccl")
