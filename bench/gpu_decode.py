"""Decoding on a GPU: attention of one query with a long cache, dense and paged, as a share of what a copy moves.

python -m bench.gpu_decode --smoke                                        # is each configuration right? small sizes
python -m bench.gpu_decode --json out/decode.json                         # all cases, about four minutes
python -m bench.gpu_decode --only dense "paged 64" --parts 1 2 4 --most 3 --seconds 2
python -m bench.gpu_decode --device cpu --shrink 64 --only dense          # tries the command out

The cases have 32 sequences of 8192 keys, 32 query heads of 128 elements, 8 key heads; some have fewer. Each configuration of
`triton_attention` runs with each number of `--parts` of the softmax. Bytes are those of the keys and values that count, read
once; the copy's rate, of bytes read and written, comes from the same run. `--smoke` times nothing (`bench/smoke.py`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench import smoke
from bench.contenders import copy_of, failure
from bench.gpu_matmuls import quiet
from bench.gpu_timing import Entry, machine_rates, prepare, relative_error, timed
from bench.measure import synchronize
from bench.measurements import write
from bench.smoke import Check, Task
from kgen.only import Pick, only
from kgen.templates.contract import Config

TEMPLATE = "triton_attention"
# The largest relative error of a check.
TOLERANCE = 0.01
Function = Callable[..., Tensor]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def with_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    inside = torch.arange(k.shape[2], device=k.device) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=inside, enable_gqa=True)


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    """The pages of each sequence, one behind the other, heads first."""
    page, heads, size = cache.shape[1:]
    return cache[table].reshape(table.shape[0], table.shape[1] * page, heads, size).transpose(1, 2)


def paged(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    return with_lengths(q, gathered(k, table), gathered(v, table), lengths)


def updated(q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, place: Tensor) -> Tensor:
    """With the step's own keys and values, which go to one place of all sequences first."""
    k.index_copy_(2, place, new_k)
    v.index_copy_(2, place, new_v)
    keep = torch.arange(k.shape[2], device=k.device) <= place[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)


def paged_and_updated(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, *new: Tensor) -> Tensor:
    """The same of pages, in which each sequence has a slot, the last of what is `new`."""
    new_k, new_v, slots = new
    heads, size = k.shape[2:]
    k.view(-1, heads, size).index_copy_(0, slots, new_k)
    v.view(-1, heads, size).index_copy_(0, slots, new_v)
    return paged(q, k, v, lengths, table)


def flex(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, table: Tensor | None = None) -> Tensor:
    """FlexAttention, which takes a length as a function of the score."""
    from torch.nn.attention.flex_attention import flex_attention

    if table is not None:
        k, v = gathered(k, table), gathered(v, table)

    def score(s: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        assert lengths is not None
        return torch.where(n < lengths[b], s, -math.inf)

    made: Tensor = flex_attention(q, k, v, score_mod=None if lengths is None else score, enable_gqa=True)
    return made


@dataclass(frozen=True)
class Case:
    """Sequences, heads of queries and of keys, rows, keys, elements of a head; pages of so many keys, 0: none. With `ragged`
    sequences have between half and all of the keys. With `new` keys and values these go to the cache in the same graph."""

    name: str
    function: Function
    sizes: tuple[int, int, int, int, int, int] = (32, 32, 8, 1, 8192, 128)
    page: int = 0
    ragged: bool = False
    new: bool = False

    def shrunk(self, by: int) -> Case:
        batch, heads, shared, rows, keys, size = self.sizes
        step = max(self.page, 16)
        return replace(self, sizes=(max(2, batch // by), heads, shared, rows, max(step, keys // by // step * step), size))

    def make(self, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        batch, heads, shared, rows, keys, size = self.sizes
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        q = random(batch, heads, rows, size)
        if not self.page:
            args = [q, random(batch, shared, keys, size), random(batch, shared, keys, size)]
            if self.new:
                own = [random(batch, shared, rows, size) for _ in range(2)]
                return [*args, *own, torch.arange(keys - rows, keys, device=device)]
            return [*args, self.lengths(device, seed)] if self.ragged else args
        pages = keys // self.page
        table = torch.randperm(batch * pages, generator=generator, device=device).reshape(batch, pages)
        k, v = (random(batch * pages, self.page, shared, size) for _ in range(2))
        lengths = self.lengths(device, seed)
        args = [q, k, v, lengths, table]
        if self.new:
            last = lengths - 1
            slots = table.gather(1, (last // self.page)[:, None])[:, 0] * self.page + last % self.page
            args += [*(random(batch, shared, size) for _ in range(2)), slots]
        return args

    def lengths(self, device: str, seed: int) -> Tensor:
        batch, keys = self.sizes[0], self.sizes[4]
        generator = torch.Generator(device).manual_seed(seed + 1)
        some = torch.randint(keys // 2, keys + 1, (batch,), generator=generator, device=device)
        return some if self.ragged else torch.full_like(some, keys)

    def bytes(self, device: str) -> float:
        """Of keys and values that count, and of queries and results."""
        batch, heads, shared, rows, _, size = self.sizes
        return 2.0 * (2 * shared * size * int(self.lengths(device, 0).sum()) + 2 * batch * heads * rows * size)


CASES = (
    Case("dense", dense),
    Case("one sequence", dense, (1, 32, 8, 1, 32768, 128)),
    Case("lengths", with_lengths, ragged=True),
    Case("paged 16", paged, page=16),
    Case("paged 64", paged, page=64),
    Case("paged 128", paged, page=128),
    Case("paged lengths", paged, page=64, ragged=True),
    Case("updated", updated, new=True),
    Case("paged updated", paged_and_updated, page=64, new=True),
    Case("short sequence", dense, (1, 32, 8, 1, 8192, 128)),
    Case("short paged", paged, (1, 32, 8, 1, 8192, 128), page=16),
    Case("few short", dense, (4, 32, 8, 1, 2048, 128)),
)
SMOKE = (
    Case("dense", dense, (2, 16, 2, 1, 1024, 128)),
    Case("odd keys", dense, (2, 8, 1, 3, 1000, 64)),
    Case("16 rows", dense, (1, 8, 2, 16, 777, 96)),
    Case("one key head each", dense, (2, 4, 4, 1, 2048, 128)),
    Case("lengths", with_lengths, (3, 8, 2, 1, 2048, 128), ragged=True),
    Case("paged 16", paged, (2, 16, 2, 1, 1024, 128), page=16),
    Case("paged 128", paged, (2, 16, 2, 1, 2048, 128), page=128, ragged=True),
    Case("updated", updated, (2, 16, 4, 3, 1024, 64), new=True),
    Case("paged updated", paged_and_updated, (2, 16, 2, 1, 1024, 128), page=16, new=True),
)


def with_kgen(case: Case, pick: Pick, parts: int, device: str) -> tuple[Function, Any]:
    """The compiled function, and where it has to be called first."""
    options = {"cache": False, "gpu_interpreter": device == "cpu"}
    made = torch.compile(copy_of(case.function), backend="kgen", fullgraph=True, options=options)
    return made, only(TEMPLATE, pick, parts=parts)


def contenders(case: Case, args: Sequence[Tensor], options: argparse.Namespace) -> Iterator[tuple[str, Function, Any]]:
    yield "eager", case.function, nullcontext()
    if not case.new:
        yield "flex", torch.compile(copy_of(flex), fullgraph=True), quiet()
    yield "inductor", torch.compile(copy_of(case.function), fullgraph=True), quiet()
    known = {"cache": False, "gpu_interpreter": options.device == "cpu"}
    yield "kgen", torch.compile(copy_of(case.function), backend="kgen", fullgraph=True, options=known), nullcontext()
    for config in configs_of(case, args, options.device)[: options.most]:
        tile = "x".join(str(config.get(name)) for name in ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES"))
        for parts in options.parts:
            call, context = with_kgen(case, lambda _, config=config: config, parts, options.device)  # type: ignore[misc]
            yield f"{tile} parts {parts}", call, context


def configs_of(case: Case, args: Sequence[Tensor], device: str) -> list[Config]:
    """The configurations on offer, the likely fastest first."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        return seen[0]

    call, context = with_kgen(case, pick, 1, device)
    with context:
        call(*args)
    return list(seen)


def measure(case: Case, options: argparse.Namespace, copy: float) -> dict[str, Any]:
    torch._dynamo.reset()
    case = case.shrunk(options.shrink) if options.shrink > 1 else case
    sets = [case.make(options.device, seed) for seed in range(2)]
    want, failed, entries = case.function(*sets[0]), dict[str, str](), list[Entry]()
    for name, call, context in contenders(case, sets[0], options):
        entry = Entry(name)
        try:
            prepare(entry, call, sets, want, context)
            entries.append(entry)
        except Exception as cause:
            failed[name] = failure(cause)
            synchronize()
    row = {"name": case.name, "sizes": case.sizes, "bytes": case.bytes(options.device), "copy": copy, "failed": failed}
    row |= timed(entries, options.seconds, options.device == "cuda")
    del entries, sets
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def show(row: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{row['name']}[/] {'x'.join(map(str, row['sizes']))}", highlight=False)
    for name, one in sorted(row["results"].items(), key=lambda item: item[1]["seconds"]):
        rate = row["bytes"] / one["seconds"]
        console.print(
            f"    {name:28} {one['seconds'] * 1e6:9.1f} us {rate / 1e9:7.0f} GB/s, {rate / row['copy']:.2f} of a copy, "
            f"error {one['error']:.1e}, {one['compile_s']:.1f} s", highlight=False,
        )  # fmt: skip
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)


# ---- is it right? ---------------------------------------------------------------------------------------------------

# Configurations of a case that are checked at most, and the parts that each is checked with.
CONFIGS, SPLITS = 6, (1, 4)


def tasks_of(template: str) -> list[Task]:
    return [
        Task(f"{case.name}, parts {parts}", partial(_checked, case, parts), most=CONFIGS) for case in SMOKE for parts in SPLITS
    ]


def _checked(case: Case, parts: int) -> Check:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = case.make(device)
    want = case.function(*(a.double() if a.is_floating_point() else a for a in args))

    def call(pick: Pick) -> str:
        function, context = with_kgen(case, pick, parts, device)
        with context:
            error = relative_error(function(*args).double(), want)
        return "" if error <= TOLERANCE else f"relative error {error:.1e}"

    return call


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="cases")
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 2, 4, 8], help="of the softmax")
    parser.add_argument("--most", type=int, default=3, help="configurations, the likely fastest first")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, for each case")
    parser.add_argument("--smoke", action="store_true", help="only whether each configuration is right, on small sizes")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide sequences and keys by about this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --shrink 64 tries the command out")
    if options.smoke:
        raise SystemExit(smoke.check([TEMPLATE], tasks_of))
    console, rows = Console(width=200), []
    copy = machine_rates(options.device, 8192 if options.device == "cuda" else 64)["copy"]
    console.print(f"copy {copy:.3g}/s", highlight=False)
    with torch.no_grad():
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            rows.append(measure(case, options, copy))
            show(rows[-1], console)
            if options.json:
                write(options.json, "gpu_decode", rows)


if __name__ == "__main__":
    main()
