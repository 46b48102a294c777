"""Templates of loop kernels: declared like those of contractions, replaced by others, rendered under every configuration."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen import errors
from kgen.commands.explain import watching
from kgen.ir.index import Sizes
from kgen.ir.plan import Choice, Kernel
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler import Gpu, Options, choose_tiles
from kgen.templates import registry
from kgen.templates.loop_contract import LoopProblem, LoopTemplate, loop_problem
from kgen.templates.loop_slots import SLOTS
from tests import template_author
from tests.kernels import plans

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import kgen


@kgen.template(implements=kgen.loops("{kind}", replaces="{replaces}"), device="{device}", source="{source}", name="{name}")
class Own({base}):
    """A loop kernel of somebody else's."""
{methods}
'''
CPP = """
{% import "macros.cpp.jinja" as m %}
{{ kernel() }}
  const int64_t chunk = {{ CHUNK }};
  for (int64_t begin = 0; begin < {{ tasks.vector.extent }}; begin += chunk) {
    const int64_t end = minimum_(begin + chunk, int64_t({{ tasks.vector.extent }}));
    {{ m.flat_points(tasks, body) }}
  }
{{ kernel.end() }}
"""
CPP_METHODS = """
    CHUNK = kgen.knob(48, 96)

    def refuse(self, problem):
        return None if all(len(k.outer) == 1 for k in problem.kernels) else "it has several loops"
"""
TRITON = """
{{ kernel() }}
    {{ indices }}
    own: tl.constexpr = OWN
    {{ body }}
{{ kernel.end() }}
"""
TRITON_METHODS = """
    XBLOCK, OWN = kgen.knob(64, 128), kgen.knob(7)
"""
_numbers = itertools.count()


@pytest.fixture
def author(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Registers a template, and takes it out again after the test."""
    names: list[str] = []

    def write(jinja: str = TRITON, methods: str = "", **how: str) -> str:
        given = {"kind": "pointwise", "device": "cuda", "replaces": "triton_pointwise", "base": "kgen.LoopKernel", **how}
        name = given.setdefault("name", f"own_{next(_numbers)}")
        source = given.setdefault("source", f"{name}.jinja")
        (tmp_path / source).write_text(jinja)
        path = tmp_path / f"{name}.py"
        path.write_text(MODULE.format(methods=methods, **given))
        names.append(name)
        template_author.load(path)
        return name

    yield write
    for name in names:
        if not name.startswith(("cpp_", "triton_")):
            registry.remove(name)


def texts(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """The result of the compiled function, and the texts of its kernels."""
    torch._dynamo.reset()
    with watching() as seen, torch.no_grad():
        got = torch.compile(f, backend="kgen", options={"cache": False, **options})(*args)
    return got, [one.source for one in seen.report().kernels]


def scaled(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


def scaled_points() -> LoopProblem:
    """The one kernel of `scaled` as a GPU's template sees it."""
    plan = plans(scaled, torch.randn(4096), options=Options(gpu_everywhere=True)).forward
    [kernel] = plan.kernels
    assert isinstance(kernel, Kernel)
    return loop_problem(kernel, plan.graph, [choose_tiles(kernel, plan.graph, Sizes({}), Gpu())])


# ---- replacing ---------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_a_template_replaces_the_built_in_one(author: Callable[..., str]) -> None:
    name = author(CPP, CPP_METHODS, device="cpu", replaces="cpp_pointwise")
    x = torch.randn(1000)
    got, [text] = texts(scaled, x)
    torch.testing.assert_close(got, scaled(x))
    assert "const int64_t chunk = 48;" in text
    registry.remove(name)
    got, [text] = texts(scaled, x)
    torch.testing.assert_close(got, scaled(x))
    assert "chunk" not in text


@pytest.mark.cpu
def test_what_it_refuses_goes_to_the_one_before(author: Callable[..., str]) -> None:
    author(CPP, CPP_METHODS, device="cpu", replaces="cpp_pointwise")

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() * 2 + y, x.sum(-1)

    x, y = torch.randn(40, 30), torch.randn(30, 40)
    got, found = texts(f, x, y)
    torch.testing.assert_close(got, f(x, y))
    assert found
    assert not any("chunk" in text for text in found)


@pytest.mark.interpret
def test_a_template_in_triton_with_a_knob_of_its_own(author: Callable[..., str]) -> None:
    author(TRITON, TRITON_METHODS)
    x = torch.randn(1000)
    got, [text] = texts(scaled, x, gpu_interpreter=True)
    torch.testing.assert_close(got, scaled(x))
    assert "OWN: tl.constexpr = 7" in text
    assert "own: tl.constexpr = OWN" in text
    _, found = texts(lambda x: x.softmax(-1), x, gpu_interpreter=True)
    assert not any("OWN" in text for text in found), "rows have a template of their own"


def test_where_every_template_refuses(author: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    author(methods="    def refuse(self, problem):\n        return 'not today'\n")
    [_, built_in] = registry.loop_templates("pointwise", "cuda")
    monkeypatch.setattr(type(built_in.author), "refuse", lambda self, problem: "nor here")
    with pytest.raises(errors.NoLoopTemplate, match=r"own_\d+: not today; triton_pointwise: nor here"):
        registry.render_loops(scaled_points(), "k")


def test_a_cached_graph_depends_on_it(author: Callable[..., str]) -> None:
    before = registry.fingerprint()
    name = author()
    [added] = set(registry.fingerprint()) - set(before)
    assert added == (name, registry.loop_templates("pointwise", "cuda")[0].version)


def test_a_version_covers_what_is_included(author: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "shared.jinja").write_text("# one\n")
    name = author('{{ kernel() }}\n{{ body }}\n{% include "shared.jinja" %}\n')
    first = registry.loop_templates("pointwise", "cuda")[0]
    (tmp_path / "shared.jinja").write_text("# another\n")
    registry.remove(name)
    template_author.load(tmp_path / f"{name}.py")
    second = registry.loop_templates("pointwise", "cuda")[0]
    assert (second.name, second.version != first.version) == (name, True)


# ---- declarations ------------------------------------------------------------------------------------------------------


def test_a_kind_of_loops_has_one_template_unless_another_names_it(author: Callable[..., str]) -> None:
    with pytest.raises(errors.LoopsTaken, match="have a template, triton_pointwise"):
        author(replaces="")
    first = author()
    with pytest.raises(errors.LoopsTaken, match=f"replaces='{first}'"):
        author()
    second = author(replaces=first)
    names = [one.name for one in registry.loop_templates("pointwise", "cuda")]
    assert names == [second, first, "triton_pointwise"]


def test_a_module_may_register_its_template_again(author: Callable[..., str]) -> None:
    before = registry.loop_templates("scan", "cpu")
    registry.add_loops(before[0])
    assert registry.loop_templates("scan", "cpu") == before


def test_names_are_those_of_one_template(author: Callable[..., str]) -> None:
    with pytest.raises(errors.DuplicateTemplate, match="triton_pointwise"):
        author(name="triton_pointwise")
    taken = registry.find("cpp_matmul").name
    with pytest.raises(errors.DuplicateTemplate, match=taken):
        author(name=taken)


MISTAKES = {
    "the kinds of loops are pointwise": {"kind": "pointwize"},
    "is none of cuda, cpu": {"device": "tpu"},
    "does not derive from kgen.LoopKernel": {"base": ""},
    "nothing asks for its refuze": {"methods": "    def refuze(self, problem):\n        return None\n"},
    "knob XBLOCK has no values": {"methods": "    XBLOCK = kgen.knob()\n"},
    "knob XBLOCK has the value 'fast'": {"methods": "    XBLOCK = kgen.knob('fast')\n"},
    "uses bodi: no knob and no slot, which are body, config, indices, kernel": {"jinja": "{{ kernel() }}\n{{ bodi }}\n"},
    "never renders the slot kernel": {"jinja": "{{ body }}\n"},
    "never renders the slot body": {"jinja": "{{ kernel() }}\n    {{ indices }}\n"},
    "never renders the slot sections": {
        "jinja": "{{ kernel() }}\n    {{ body }}\n",
        "kind": "scan",
        "replaces": "triton_scan",
    },
    "includes other.jinja, which is no file": {"jinja": '{{ kernel() }}\n{% include "other.jinja" %}\n'},
    "line 2": {"jinja": "{{ kernel() }}\n{{ body\n"},
    "which are ": {"kind": "packing", "replaces": ""},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_found_at_registration(author: Callable[..., str], message: str) -> None:
    with pytest.raises(errors.BadTemplate, match=re.escape(message)):
        author(**MISTAKES[message])


def test_the_file_has_to_be_there(author: Callable[..., str], tmp_path: Path) -> None:
    name = author()
    (tmp_path / f"{name}.jinja").unlink()
    with pytest.raises(errors.BadTemplate, match="there is no file"):
        template_author.load(tmp_path / f"{name}.py")


def test_built_in_templates_cover_every_kind() -> None:
    for device, kind in SLOTS:
        assert len(registry.loop_templates(kind, device)) == 1, (kind, device)


def test_slots_are_typed() -> None:
    holding = [path for path in (ROOT / "templates").rglob("*.py") if "SimpleNamespace" in path.read_text()]
    assert not holding


# ---- configurations ----------------------------------------------------------------------------------------------------


def rows(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).relu()


def scanned(x: Tensor) -> Tensor:
    return x.cumsum(-1) * 2


def both_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), x.sum(0)


def many(x: Tensor) -> list[Tensor]:
    return torch._foreach_add([x, x[:5] * 2, x[1:] + 1], 1.0)


KINDS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x: x.t() * 2 + x.relu().t(), "reduction": rows, "scan": scanned, "column_reduction": both_sums,
    "multi_tensor": many,
}  # fmt: skip


@pytest.fixture
def with_config(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[tuple[str, str]]]:
    """Renders each loop kernel under the configuration of a number; the kinds and configurations that were rendered."""
    real = registry.render_loops

    def choose(number: int) -> list[tuple[str, str]]:
        used: list[tuple[str, str]] = []

        def render(problem: LoopProblem, symbol: str, choice: Choice | None = None) -> Any:
            template: LoopTemplate = registry.loop_template(problem)
            configs = list(template.configs(problem))
            assert configs[0] == template.config(problem), "the scheduler's comes first"
            config = configs[min(number, len(configs) - 1)]
            used.append((problem.kind, str(config)))
            return real(problem, symbol, Choice(template.name, config.values))

        monkeypatch.setattr(registry, "render_loops", render)
        return used

    return choose


@pytest.mark.parametrize(("kind", "number"), [*((kind, 100) for kind in KINDS), ("pointwise", 1), ("reduction", 1)])
@pytest.mark.interpret
def test_every_configuration_is_right_in_triton(with_config: Callable[[int], Any], kind: str, number: int) -> None:
    used = with_config(number)
    x = torch.randn(500, 64) if kind == "column_reduction" else torch.randn(33, 70)
    got, _ = texts(KINDS[kind], x, gpu_interpreter=True)
    torch.testing.assert_close(got, KINDS[kind](x), rtol=1e-4, atol=1e-4)
    assert kind in dict(used)


@pytest.mark.cpu
@pytest.mark.parametrize("number", [1, 100])
def test_every_configuration_is_right_in_cpp(with_config: Callable[[int], Any], number: int) -> None:
    used = with_config(number)
    xs = [torch.randn(500, 64) for _ in KINDS]

    def f(xs: list[Tensor]) -> list[Any]:
        return [one(x) for one, x in zip(KINDS.values(), xs, strict=True)]

    got, _ = texts(f, xs)
    torch.testing.assert_close(got, f(xs), rtol=1e-4, atol=1e-4)  # sums of 500 numbers in another order
    got, _ = texts(KINDS["pointwise"], xs[0])  # above, points of several tensors share a kernel
    torch.testing.assert_close(got, KINDS["pointwise"](xs[0]))
    assert {"pointwise", "multi_tensor", "reduction", "scan"} <= set(dict(used))


def test_a_choice_names_the_template_and_its_knobs() -> None:
    problem = scaled_points()
    plain, other = (
        registry.render_loops(problem, "k", choice) for choice in (None, Choice("triton_pointwise", (("XBLOCK", 64),)))
    )
    assert isinstance(plain, KernelCall)
    assert isinstance(other, KernelCall)
    assert plain.launch is not None
    assert other.launch is not None
    assert f"XBLOCK: tl.constexpr = {problem.tilings[0].blocks.x}" in plain.launch.source
    assert "XBLOCK: tl.constexpr = 64" in other.launch.source
    assert other.grid[0].as_int() == 64
    for value in (0, 96):
        with pytest.raises(errors.BadTemplate, match=f"cannot have XBLOCK={value}"):
            registry.render_loops(problem, "k", Choice("triton_pointwise", (("XBLOCK", value),)))
    with pytest.raises(errors.BadTemplate, match="cannot have YBLOCK=16"):
        registry.render_loops(problem, "k", Choice("triton_pointwise", (("YBLOCK", 16),)))
    with pytest.raises(errors.BadTemplate, match="which are no knobs"):
        registry.render_loops(problem, "k", Choice("triton_pointwise", (("YELLOW", 64),)))
    with pytest.raises(errors.NoLoopTemplate, match="none is registered as cpp_pointwise"):
        registry.render_loops(problem, "k", Choice("cpp_pointwise", ()))
