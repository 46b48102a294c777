"""Exported programs: right in this process and in one without a compiler, with clear errors for what they do not take."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import kgen
import kgen.host.exported
from kgen import errors
from kgen.build import toolchain

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]


class Mixed(nn.Module):
    """Writes to a buffer and an argument, and returns views of arguments, numbers and nothing."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.constant = torch.ones(4)

    def forward(self, x: Tensor, d: dict[str, Tensor], k: int = 2, *, y: Tensor | None = None) -> dict[str, Any]:
        self.count.add_(x.sum(0))
        d["a"].mul_(k)
        out = self.linear(x) * self.scale + self.constant + self.count
        return {"out": out, "flat": x.view(-1), "rows": x.shape[0], "none": None, "same": x, "pair": (d["a"][0], 3)}


class Cache(nn.Module):
    """A decoding step with a key cache."""

    keys: Tensor
    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 8, 4))
        self.register_buffer("position", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(1, self.position[None], x[:, None])
        self.position += 1
        return (self.keys @ x.unsqueeze(-1)).softmax(1), self.position * 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, 16))  # type: ignore[no-any-return]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.max_pool2d(self.second(F.relu(self.norm(self.first(x)))), 2)
        return F.adaptive_avg_pool2d(h, 1).flatten(1), h


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, i: Tensor) -> tuple[Tensor, ...]:
        out = self.head(self.embedding(i))
        return out, out[0], out.t()


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i = x.nonzero().squeeze(-1)
        return x[i] * 2, i


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0] // 2, 2, -1).sum(1)


def rows(*counts: int, width: int = 4, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(count, width, dtype=dtype),) for count in counts]


def sequences(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(b, n, 16, dtype=dtype),) for b, n in ((2, 5), (1, 5), (3, 1), (4, 9))]


FREE = Dim("free", max=1000)
BATCH, LENGTH = Dim("batch"), Dim("length")
# A module, calls of which the first is the example, and what may change.
CASES: dict[str, tuple[Callable[[], nn.Module], list[tuple[Tensor, ...]], Any]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)), rows(3, 1, 0, 9), ({0: FREE},)),
    "attention": (Attention, sequences(torch.float32), ({0: BATCH, 1: LENGTH},)),
    "attention in bfloat16": (lambda: Attention().bfloat16(), sequences(torch.bfloat16), ({0: BATCH, 1: LENGTH},)),
    "convolution": (Convolution, [(torch.randn(n, 3, 8, 8),) for n in (2, 1, 5)], ({0: FREE},)),
    "cache": (Cache, [(torch.randn(2, 4),) for _ in range(3)], None),
    "tied weights": (Tied, [(torch.arange(n),) for n in (5, 1, 9)], ({0: FREE},)),
    "data decide": (Nonzero, [(torch.tensor([0.0, 1, 2]),), (torch.zeros(7),), (torch.ones(1),)], ({0: FREE},)),
    "no sizes": (lambda: nn.Linear(4, 4), rows(3), None),
}
TOLERANCES = {torch.bfloat16: 2e-2}


def exported(module: nn.Module, folder: Path, args: tuple[Any, ...], **settings: Any) -> kgen.host.exported.LoadedProgram:
    kgen.export(module, args, folder=folder, **settings)
    return kgen.load(folder)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_programs_give_what_modules_give(name: str, tmp_path: Path) -> None:
    make, calls, sizes = CASES[name]
    module = make().eval()
    program = exported(module, tmp_path / "program", calls[0], dynamic_shapes=sizes)
    for args in calls:
        with torch.no_grad():
            expected = module(*args)
        found = program(*args)
        tolerance = TOLERANCES.get(args[0].dtype, 1e-5)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert [t.stride() for t in pytree.tree_leaves(found)] == [t.stride() for t in pytree.tree_leaves(expected)]
    for key, value in module.named_buffers():
        torch.testing.assert_close(program.weights[key], value)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program that has everything, after it was moved, and can no longer be written."""
    torch.manual_seed(0)
    made, folder = tmp_path_factory.mktemp("made") / "program", tmp_path_factory.mktemp("moved") / "program"
    sizes = {"x": {0: Dim("rows", max=100)}, "d": {"a": None}, "k": None, "y": None}
    kgen.export(Mixed().eval(), (*arguments(3), 2), {"y": torch.ones(1)}, folder=made, dynamic_shapes=sizes)
    made.rename(folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder


def arguments(count: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.randn(count + 1, 4)[1:], {"a": torch.ones(2, 2)}


def test_writes_and_aliases_are_those_of_the_module(mixed: Path) -> None:
    program, module = kgen.load(mixed), Mixed().eval()
    module.load_state_dict({k: v for k, v in program.weights.items() if k in module.state_dict()})
    for count in (3, 1, 7, 0, 100):
        x, d = arguments(count)
        theirs = copy.deepcopy(d)
        expected, found = module(x, theirs, 2, y=torch.ones(1)), program(x, d, 2, y=torch.ones(1))
        torch.testing.assert_close(found, pytree.tree_map_only(Tensor, Tensor.detach, expected))
        torch.testing.assert_close((d, program.weights["count"]), (theirs, module.count))
        assert found["same"] is x
        assert found["flat"].data_ptr() == x.data_ptr()
        assert found["pair"][0].data_ptr() == d["a"].data_ptr()


def test_another_process_needs_no_compiler_and_no_cache(mixed: Path, tmp_path: Path) -> None:
    script = f"""
import sys, torch, kgen
program = kgen.load({str(mixed)!r})
torch.save(program(torch.ones(3, 4), {{"a": torch.ones(2, 2)}}, 2, y=torch.ones(1))["out"], sys.argv[1])
assert not {{"torch._dynamo", "torch._inductor", "triton", "sympy"}} - {{"sympy"}} & sys.modules.keys()
"""
    environment = {**os.environ, "PATH": "/nowhere", "KGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "out"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = kgen.load(mixed)(torch.ones(3, 4), {"a": torch.ones(2, 2)}, 2, y=torch.ones(1))["out"]
    torch.testing.assert_close(torch.load(tmp_path / "out"), expected)
    assert not (tmp_path / "cache").exists()


def test_an_argument_of_another_layout_is_copied(mixed: Path) -> None:
    program = kgen.load(mixed)
    weights = {k: v.clone() for k, v in program.weights.items()}
    x, d = torch.randn(4, 3).t(), {"a": torch.ones(2, 2)}
    found = program(x, d, 2, y=torch.ones(1))
    assert found["same"] is x
    torch.testing.assert_close(found["out"], kgen.load(mixed, weights)(x.contiguous(), d, 2, y=torch.ones(1))["out"])


def test_weights_may_be_replaced(mixed: Path) -> None:
    zeros = {"linear.weight": torch.zeros(4, 4), "linear.bias": torch.zeros(4)}
    program = kgen.load(mixed, zeros)
    x, d = arguments(3)
    torch.testing.assert_close(program(x, d, 2, y=torch.ones(1))["out"], 1 + x.sum(0).expand(3, 4))
    program.weights["constant"] = torch.full((4,), 5.0)
    program.weights["count"].zero_()
    torch.testing.assert_close(program(x, d, 2, y=torch.ones(1))["out"], 5 + x.sum(0).expand(3, 4))


def test_results_have_no_gradients(mixed: Path) -> None:
    x, d = arguments(3)
    assert not kgen.load(mixed)(x.requires_grad_(), d, 2, y=torch.ones(1))["out"].requires_grad


Y = torch.ones(1)
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "structure": (lambda p: p(torch.ones(3, 4)), "structure"),
    "keyword": (lambda p: p(*arguments(3), 2, z=Y), "structure"),
    "shape": (lambda p: p(torch.ones(3, 5), {"a": torch.ones(2, 2)}, 2, y=Y), r"x has the shape \(3, 5\)"),
    "rank": (lambda p: p(torch.ones(3), {"a": torch.ones(2, 2)}, 2, y=Y), r"x has the shape \(3,\)"),
    "size": (lambda p: p(*arguments(101), 2, y=Y), r"x.shape\[0\] is 101, and not .*<= 100"),
    "number": (lambda p: p(*arguments(3), 3, y=Y), "k is 3, and not 2"),
    "dtype": (lambda p: p(torch.ones(3, 4).double(), {"a": torch.ones(2, 2)}, 2, y=Y), "x is torch.float64"),
    "no tensor": (lambda p: p(7, {"a": torch.ones(2, 2)}, 2, y=Y), "x is 7, and not a tensor"),
    "layout of what is written": (
        lambda p: p(torch.ones(3, 4), {"a": torch.ones(2, 4)[:, ::2]}, 2, y=Y),
        "d_a has the strides",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str, mixed: Path) -> None:
    call, message = WRONG[name]
    program = kgen.load(mixed)
    before = program.weights["count"].clone()
    with pytest.raises(errors.WrongArguments, match=message):
        call(program)
    assert torch.equal(program.weights["count"], before)


@pytest.mark.parametrize(("name", "value"), [("nothing", torch.ones(4)), ("count", torch.ones(3))])
def test_wrong_weights_are_named(name: str, value: Tensor, mixed: Path) -> None:
    with pytest.raises(errors.WrongArguments, match=name):
        kgen.load(mixed, {name: value})


def test_two_sizes_that_are_one(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    program = exported(Sum(), tmp_path / "program", (torch.ones(3), torch.ones(3)), dynamic_shapes=({0: FREE}, {0: FREE}))
    torch.testing.assert_close(program(torch.ones(5), torch.ones(5)), torch.full((5,), 2.0))
    with pytest.raises(errors.WrongArguments, match="y has the shape"):
        program(torch.ones(5), torch.ones(4))


def damaged(folder: Path, tmp_path: Path, name: str, text: bytes | None) -> Path:
    made = tmp_path / "copy"
    made.mkdir()
    for path in folder.iterdir():
        if path.name != name:
            (made / path.name).write_bytes(path.read_bytes())
        elif text is not None:
            (made / name).write_bytes(text)
    return made


@pytest.mark.parametrize("text", [None, b"", b"{}"], ids=["absent", "empty", "another"])
@pytest.mark.parametrize("name", ["manifest.json", "program.pickle", "weights.pt", "kernels0.so", "runtime.so"])
def test_damaged_folders_are_refused(name: str, text: bytes | None, mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.NoExport):
        kgen.load(damaged(mixed, tmp_path, name, text))


def test_another_machine_is_refused(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = (mixed / "manifest.json").read_bytes().replace(torch.__version__.encode(), b"1.0")
    with pytest.raises(errors.ExportedElsewhere, match=r"torch was 1\.0"):
        kgen.load(damaged(mixed, tmp_path, "manifest.json", other))
    monkeypatch.setattr(toolchain, "cpu_features", lambda: frozenset({"sse2"}))
    if toolchain.features_of(toolchain.isa()):
        with pytest.raises(errors.ExportedElsewhere, match="features"):
            kgen.load(mixed)


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        step = torch.ops.higher_order.while_loop
        return step(lambda i, x: i < 5, lambda i, x: (i + 1, x * 1.5), (torch.zeros((), dtype=torch.long), x), ())


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    with pytest.raises(errors.NotExportable, match="no dimension"):
        kgen.export(Halves(), (torch.ones(4, 6),), folder=tmp_path / "a", dynamic_shapes=({0: 2 * Dim("half")},))
    with pytest.raises(errors.NotExportable, match="Python functions"):
        kgen.export(Loop(), (torch.ones(4),), folder=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(errors.UnknownOption):
        kgen.export(Nonzero(), (torch.ones(4),), folder=tmp_path / "b", options={"nothing": 1})  # type: ignore[typeddict-unknown-key]


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.kgen_tests.exported_double(x) + 1  # type: ignore[no-any-return]


def test_operators_of_libraries(tmp_path: Path) -> None:
    """Another process must define them first, and is told so."""
    library = torch.library.Library("kgen_tests", "FRAGMENT")
    library.define("exported_double(Tensor x) -> Tensor")
    library.impl("exported_double", lambda x: x * 2, "CPU")
    torch.library.register_fake("kgen_tests::exported_double", torch.empty_like, lib=library)
    program = exported(Custom(), tmp_path / "program", (torch.ones(4),))
    torch.testing.assert_close(program(torch.ones(4)), torch.full((4,), 3.0))
    script = f"import kgen; kgen.load({str(tmp_path / 'program')!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "OperatorNotLoaded: the exported program calls kgen_tests::exported_double" in done.stderr


def test_a_module_that_asks_whether_a_size_is_one(tmp_path: Path) -> None:
    """torch's own encoder does. Its program takes the other sizes, and says so."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    module = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    program = exported(module, tmp_path / "program", (torch.randn(2, 5, 8),), dynamic_shapes=({0: BATCH, 1: LENGTH},))
    x = torch.randn(3, 7, 8)
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.WrongArguments, match=r"is 1, .* and not 2 <= src.shape\[0\]"):
        program(torch.randn(1, 7, 8))


def test_code_for_a_lesser_cpu(tmp_path: Path) -> None:
    program = exported(nn.Softmax(-1), tmp_path / "program", (torch.ones(3, 4),), options={"isa": "generic"})
    torch.testing.assert_close(program(torch.ones(3, 4)), torch.full((3, 4), 0.25))
    assert '"features": []' in (tmp_path / "program" / "manifest.json").read_text()
