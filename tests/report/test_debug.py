"""The debug folder: its files, and the script that runs by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import kgen
from kgen.only import only
from kgen.report.debug import kernels_text
from kgen.report.standalone import Script

pytestmark = pytest.mark.cpu

FILES = {"fx.txt", "graph.pkl", "ir_lowered.txt", "ir_scheduled.txt", "kernels.cpp", "output_code.py", "verdicts.txt"}


def debugged(folder, f, *args, **options):
    compiled = torch.compile(f, backend="kgen", options={"cache": False, "debug": str(folder), **options}, dynamic=False)
    return compiled(*args)


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user would: in a process of its own, from another folder."""
    root = Path(kgen.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)} if not (root / "lowering").exists() else dict(os.environ)
    script = [sys.executable, str(folder / "output_code.py")]
    return subprocess.run(script, capture_output=True, text=True, cwd=folder.parent, env=environment, check=False)


def run_here(folder: Path) -> Script:
    """The same in this process, which saves seconds."""
    names: dict[str, object] = {"__name__": "output_code"}
    exec(compile((folder / "output_code.py").read_text(), "output_code.py", "exec"), names)
    script = names["p"]
    assert isinstance(script, Script)
    script.run(str(folder / "output_code.py"))
    return script


def test_every_stage_leaves_a_file(tmp_path):
    def f(x, w):
        return torch.softmax(torch.relu(x @ w) + 1, -1)

    x, w = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
    debugged(tmp_path, f, x, w, templates=False).sum().backward()
    folders = sorted(tmp_path.iterdir())
    assert [p.name for p in folders] == ["graph_000_forward", "graph_001_backward"]
    for folder in folders:
        assert {p.name for p in folder.iterdir()} == FILES
    text = {name: (folders[0] / name).read_text() for name in FILES - {"graph.pkl"}}
    assert "torch.ops.aten.mm.default" in text["fx.txt"]
    assert "contraction(" in text["ir_lowered.txt"]
    assert "softmax" in text["ir_lowered.txt"]  # the user's line
    for part in ("kernel ", "section 0", "in memory", "in registers", "last use of", "memory\n"):
        assert part in text["ir_scheduled.txt"]
    assert "fused, because" in text["verdicts.txt"]
    assert text["kernels.cpp"].count("#include <kgen/kernel.h>") == 1
    code = text["output_code.py"]
    assert code.startswith('"""forward graph')
    for line in ('p.call("aten::mm.out"', "p.kernel(", "p.alloc(", "p.free(", "p.output("):
        assert line in code


def test_the_script_runs_on_its_own(tmp_path):
    debugged(tmp_path, lambda x: torch.softmax(x, -1), torch.randn(8, 16))
    done = run_script(tmp_path / "graph_000_inference")
    assert done.returncode == 0, done.stderr
    assert "right:" in done.stdout
    assert "us a call" in done.stdout


def test_the_script_sees_a_wrong_kernel(tmp_path, capsys):
    debugged(tmp_path, lambda x: torch.relu(x) + 1, torch.randn(8, 16))
    folder = tmp_path / "graph_000_inference"
    source = (folder / "kernels.cpp").read_text()
    assert "float(1.0)" in source
    (folder / "kernels.cpp").write_text(source.replace("float(1.0)", "float(2.0)"))
    with pytest.raises(SystemExit):
        run_here(folder)
    assert "WRONG output 0: differs by up to 1" in capsys.readouterr().out


def mutate(x, i):
    x[i] = x[i] * 2
    x.add_(1)
    return x.view(-1)[3:9]


CASES = {
    "indices stay in range": (lambda w, i: F.embedding(i, w).sum(1), (torch.randn(5, 8), torch.tensor([[0, 4], [3, 1]]))),
    "mutation and views": (mutate, (torch.randn(12, 3), torch.tensor([3, 5]))),
    "random numbers": (lambda x: F.dropout(x, 0.5), (torch.randn(12, 3),)),
    "bfloat16": (lambda x, y: F.layer_norm(x, (16,)) * y, (torch.randn(8, 16).bfloat16(), torch.randn(16).bfloat16())),
    "expanded and transposed": (lambda x, y: x + y, (torch.randn(4, 8).t(), torch.randn(1, 4).expand(8, 4))),
    "sizes from data": (lambda x: torch.nonzero(x).float() * 2, (torch.ones(4, 3),)),
    "a number in a tensor": (lambda x, n: x * n, (torch.randn(4), torch.tensor(3.0))),
    "constants": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), (torch.randn(4, 3),)),
    "masks and integers": (lambda x, m: torch.where(m, x, x // 2).cumsum(0), (torch.arange(12), torch.arange(12) % 2 == 0)),
    "several library calls": (lambda x: torch.sort(x @ x)[0] + torch.linalg.cholesky_ex(x).L, (torch.eye(4) + 1,)),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_scripts_check_out(name, tmp_path, capsys):
    f, args = CASES[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        debugged(tmp_path, f, *(a.clone() if a.is_contiguous() else a for a in args))
    for folder in sorted(tmp_path.iterdir()):
        run_here(folder)
    assert "right:" in capsys.readouterr().out


def test_the_script_of_a_matmul_checks_out(tmp_path, capsys):
    with only("cpp_matmul", lambda configs: configs[0]):
        debugged(tmp_path, lambda x, w: F.gelu(torch.relu(x) @ w), torch.randn(8, 16), torch.randn(16, 16))
    folder = tmp_path / "graph_000_inference"
    assert "matmul(threads" in (folder / "kernels.cpp").read_text()
    assert "aten.relu.default, aten.mm.default, aten.gelu.default" in (folder / "output_code.py").read_text()
    run_here(folder)
    assert "right:" in capsys.readouterr().out


def test_a_graph_that_calls_python_says_so(tmp_path):
    debugged(tmp_path, lambda x: torch.linalg.inv(x) + 1, torch.eye(4))  # checks its result through an effect token
    folder = tmp_path / "graph_000_inference"
    assert "p.python_call(" in (folder / "output_code.py").read_text()
    with pytest.raises(SystemExit, match="cannot run alone"):
        run_here(folder)


def test_dynamic_sizes_and_saved_symbols(tmp_path, capsys):
    x, w = torch.randn(24, 16), torch.randn(16, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(
        lambda x, w: (x * w).view(-1, 8).sum(1), backend="kgen", options={"cache": False, "debug": tmp_path}
    )
    compiled(x, w).sum().backward()
    for folder in sorted(tmp_path.iterdir()):
        assert "p.symbol(24)" in (folder / "output_code.py").read_text()
        run_here(folder)
    assert capsys.readouterr().out.count("right:") == 2


def test_numbering_goes_on(tmp_path):
    (tmp_path / "graph_007_forward").mkdir()
    debugged(tmp_path, lambda x: x + 1, torch.randn(3))
    assert (tmp_path / "graph_008_inference" / "output_code.py").exists()


def test_a_failed_compilation_leaves_what_it_came_to(tmp_path, monkeypatch):
    from kgen.lowering import families

    def broken(*args):
        raise ValueError("no")

    monkeypatch.setitem(families.RULES, "aten.cos", broken)
    with pytest.raises(Exception, match="KGEN_DEBUG"):
        debugged(tmp_path, lambda x: x.cos(), torch.randn(3))
    assert {p.name for p in (tmp_path / "graph_000_inference").iterdir()} == {"fx.txt"}


def test_the_environment_sets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KGEN_DEBUG", str(tmp_path / "there"))
    torch.compile(lambda x: x - 1, backend="kgen", options={"cache": False})(torch.randn(3))
    assert (tmp_path / "there" / "graph_000_inference" / "fx.txt").exists()


def test_units_are_joined_with_one_prelude():
    unit = "#include <kgen/kernel.h>\nusing namespace kgen;\nextern int a;\n"
    assert kernels_text([unit, unit.replace("a;", "b;")]).count("#include") == 1


@pytest.mark.interpret
@pytest.mark.parametrize("f", [lambda x: x.relu().sum(-1), lambda x: x.mul_(2)], ids=["allocates", "in place"])
def test_what_fills_memory_is_no_step_of_a_script(f, tmp_path):
    torch._dynamo.reset()
    options = {"debug": str(tmp_path), "poison": True, "gpu_interpreter": True, "cache": False}
    torch.compile(f, backend="kgen", options=options)(torch.ones(4, 8))
    [script] = tmp_path.rglob("output_code.py")
    text = script.read_text()
    assert text.count("p.gpu_kernel(") == text.count("p.launch(") == 1
    assert "p.python_call(" not in text


# ---- graphs of GPU kernels --------------------------------------------------------------------------------------------


def trained(x, w, b):
    return F.layer_norm(F.gelu(torch.addmm(b, x, w)), (24,)).sin()


def stepped(x, y, z):
    return torch._foreach_add([x, y, z], 1.0)


GPU_CASES = {
    "matmul and rows": (trained, (torch.randn(12, 16), torch.randn(16, 24), torch.randn(24))),
    "combo kernel": (stepped, (torch.randn(4, 3), torch.randn(7), torch.randn(5, 2))),
    "random numbers": (lambda x: F.dropout(x, 0.5), (torch.randn(12, 3),)),
    "in place": (mutate, (torch.randn(12, 3), torch.tensor([3, 5]))),
    "bfloat16": (lambda x, w: torch.relu(x @ w), (torch.randn(8, 16).bfloat16(), torch.randn(16, 16).bfloat16())),
    "library calls too": (lambda x: torch.sort(x + 1)[0] * 2, (torch.randn(8, 16),)),
}


@pytest.mark.interpret
@pytest.mark.every(2)
@pytest.mark.parametrize("name", GPU_CASES)
def test_scripts_of_gpu_kernels_check_out_in_the_interpreter(name, tmp_path, capsys):
    f, args = GPU_CASES[name]
    torch._dynamo.reset()
    debugged(tmp_path, f, *(a.clone() for a in args), gpu_interpreter=True)
    [folder] = tmp_path.iterdir()
    script = folder / "output_code.py"
    assert "p.launch(k0_" in script.read_text()
    text = script.read_text().replace("p = Script()", 'p = Script("cuda:7")')  # as a machine with GPUs writes it
    script.write_text(text.replace("device(type='cpu')", "device(type='cuda', index=7)"))
    assert run_here(folder).is_interpreted
    out = capsys.readouterr().out
    assert "right:" in out
    assert "GPU kernels ran in Triton's interpreter" in out


@pytest.mark.interpret
def test_a_script_sees_a_wrong_gpu_kernel(tmp_path, capsys):
    torch._dynamo.reset()
    debugged(tmp_path, lambda x: torch.relu(x) + 1, torch.randn(8, 16), gpu_interpreter=True)
    [folder] = tmp_path.iterdir()
    [kernel] = folder.glob("k0_*.py")
    wrong = re.sub(r"(tl\.store\(p_add \+ .*, )(\w+\))$", r"\g<1>1e-2 + \2", kernel.read_text(), flags=re.MULTILINE)
    assert wrong != kernel.read_text()
    kernel.write_text(wrong)
    with pytest.raises(SystemExit) as ended:
        run_here(folder)
    assert ended.value.code == 1
    assert "WRONG output 0: differs by up to 0.01" in capsys.readouterr().out


@pytest.mark.interpret
def test_a_script_picks_among_gpu_kernels(tmp_path, capsys):
    torch._dynamo.reset()
    x, w = torch.randn(40, 16), torch.randn(16, 32)
    torch._dynamo.mark_dynamic(x, 0)
    options = {"cache": False, "debug": str(tmp_path), "gpu_interpreter": True}
    torch.compile(lambda x, w: torch.relu(x @ w), backend="kgen", options=options)(x, w)
    [folder] = tmp_path.iterdir()
    assert "p.symbol(40)" in (folder / "output_code.py").read_text()
    run_here(folder)
    assert "right:" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_scripts_of_gpu_kernels_check_out_on_a_gpu(name, tmp_path):
    f, args = GPU_CASES[name]
    torch._dynamo.reset()
    debugged(tmp_path, f, *(a.cuda() for a in args))
    [folder] = tmp_path.iterdir()
    done = run_script(folder)
    assert "right:" in done.stdout, done.stdout + done.stderr
    assert " us a call" in done.stdout
