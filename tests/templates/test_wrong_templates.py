"""Wrong declarations and wrong uses of slots: each is an error that names the template, the file and the line."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import template_author
import torch
from template_author import JINJA, MODULE

from kgen import config, errors
from kgen.backend import kgen_backend
from kgen.only import only
from kgen.templates import registry

pytestmark = pytest.mark.interpret
NAME = "wrong_template"
PATTERN = 'kgen.contraction("b,m,k", "b,k,n -> b,m,n")'
# Of the module: what is replaced, by what, and what the message says. It names the line of the decorator.
DECLARATIONS = {
    "no pattern": ('"b,k,n -> b,m,n"', '"b,k,n"', "is no pattern"),
    "three operands": ('"b,k,n -> b,m,n"', '"b,k,n", "b,n -> b,m,n"', "takes 2 positional arguments"),
    "a long axis": ('"b,m,k", "b,k,n', '"b,rows,k", "b,k,n', "no lower-case letter"),
    "a capital axis": ('"b,m,k", "b,k,n', '"b,M,k", "b,k,n', "no lower-case letter"),
    "a wrong window": ('"b,m,k", "b,k,n', '"b,m+n,k", "b,k,n', "a window is"),
    "an operator that does not exist": (
        PATTERN, 'kgen.operator("nowhere::nothing", "m,k", "k,n -> m,n")', "has no operator nowhere::nothing",
    ),
    "an operator without a namespace": (PATTERN, 'kgen.operator("mm", "m,k", "k,n -> m,n")', "namespace::name"),
    "an operator that is taken apart": (PATTERN, 'kgen.operator("aten::matmul", "m,k", "k,n -> m,n")', "aten::matmul apart"),
    "a program of nothing": (PATTERN, 'kgen.program(a=kgen.softmax("x", over="n"))', "no earlier step x"),
    "an unknown kind of loops": (PATTERN, 'kgen.loops("points")', "kinds of loops are"),
    "a device": ('device="cuda"', 'device="tpu"', "is none of cuda, cpu"),
    "an operand's axes": ('kgen.operand("b", "m", "k")', 'kgen.operand("m", "k")', "operands are over"),
    "a packed left operand": ('kgen.operand("b", "m", "k")', 'kgen.operand("b", "m", "k", packs=True)', "takes A packed"),
    "a missing operand": ("A, B, C = kgen.operand", "B, _, C = kgen.operand", "never renders the slot _"),
    "a result's axes": ('kgen.result("b", "m", "n")', 'kgen.result("b", "n", "m")', "results are over"),
    "no result": ('kgen.result("b", "m", "n")', "None", "results are over"),
    "an axis that is none": ("BLOCK_M,", "BLOCK_X,", "tile of an axis 'x'"),
    "a block that is no power of two": ("kgen.knob(16)", "kgen.knob(16, 48)", "BLOCK_K is 48: the sides of a tile"),
    "a knob without values": ("kgen.knob(16)", "kgen.knob()", "has no values"),
    "a text for a knob's value": ("kgen.knob(16)", 'kgen.knob("fast")', "BLOCK_K has the value 'fast', where each is an int"),
    "a text beside numbers": ("BLOCK_M,", "STAGES = kgen.knob(2, 'three')\n    BLOCK_M,", "STAGES has the value 'three'"),
    "a list for a knob's values": ("kgen.knob(16)", "kgen.knob([16, 32])", "BLOCK_K has the value [16, 32]"),
    "half a number": ("BLOCK_M,", "STAGES = kgen.knob(2, 2.5)\n    BLOCK_M,", "STAGES has the value 2.5"),
    "a family of one side": (
        'kgen.operand("b", "m", "k")', 'kgen.operand("b", "m", "k", many=True)', "one operand and the result are many",
    ),
    "sums over what the result has": (
        'kgen.operand("b", "k", "n")', 'kgen.operand("b", "k", "n", sums=True)', "never calls store_sum",
    ),
    "a missing file": ("matmul.py.jinja", "missing.py.jinja", "there is no file"),
    "a length of no axis": ("BLOCK_M,", "longest = dict(x=3)\n    BLOCK_M,", "how long axis 'x' may be"),
    "no base class": ("Matmul(kgen.KernelTemplate)", "Matmul", "write class Matmul(kgen.KernelTemplate)"),
    "a reduction": ("BLOCK_M,", "reductions = frozenset(['sun'])\n    BLOCK_M,", "reduces by 'sun'"),
    "a language": ("BLOCK_M,", "language = 'glue'\n    BLOCK_M,", "language 'glue' is none of"),
    "a way of joining": ("BLOCK_M,", "joins = 'all'\n    BLOCK_M,", "joins problems by 'all'"),
    "a way of joining that is not used": ("BLOCK_M,", "joins = 'parts'\n    BLOCK_M,", "its Jinja file never uses"),
    "a list for a method": ("BLOCK_M,", "configs = [64]\n    BLOCK_M,", "configs is a method of"),
    "a method for an attribute": ("BLOCK_M,", "family = lambda self: 3\n    BLOCK_M,", "family is no method of"),
    "a misspelled method": ("BLOCK_M,", "refuze = lambda self, problem: None\n    BLOCK_M,", "was refuse meant?"),
    "a misspelled attribute": ("BLOCK_M,", "familly = 2\n    BLOCK_M,", "was family meant?"),
    "a helper without an underscore": ("BLOCK_M,", "rows = staticmethod(len)\n    BLOCK_M,", "begins with an underscore"),
    "a workspace that is not used": (
        "BLOCK_M,", "LOCKS = kgen.workspace(None, lambda p, c: 1)\n    BLOCK_M,", "never uses LOCKS",
    ),
    "a host value that is not used": (
        "BLOCK_M,", "TILES = kgen.host_value(lambda p, c: 1)\n    BLOCK_M,", "never uses TILES",
    ),
    "a number for an axis": ('kgen.operand("b", "m", "k")', 'kgen.operand("b", "m", 3)', "axes are named by texts"),
    "numbers for a pattern": (PATTERN, "kgen.contraction(1, 2)", "axes are named by texts"),
    "a text for a pattern": (PATTERN, '"b,m,k"', "implements is kgen.contraction"),
    "a dict for examples": (
        PATTERN, 'kgen.operator("aten::mm", "m,k", "k,n -> m,n", examples={{"eps": 1}})', "examples is a list of dicts",
    ),
    "a value twice": ("kgen.knob(16)", "kgen.knob(16, 16)", "has a value more than once"),
    "a path for a source": ('source="matmul.py.jinja"', "source=kgen.knob", "source is the name"),
    "no source": ('source="matmul.py.jinja"', "source=''", "source is the name"),
    "a number for a name": ('name="{name}"', "name=3", "name is a text without spaces"),
    "a name with a space": ('name="{name}"', 'name="my matmul"', "name is a text without spaces"),
}  # fmt: skip
# Of the Jinja file.
SOURCES = {
    "a result that is never stored": (
        '    {{ C.store("acc", "b", "rm", "rn") }}\n', "", "never renders the slot C", "@kgen.template",
    ),
    "an operand that is never read": (
        '{{ B.tile("right", "b", "rk", "rn") }}', "right = left.T", "never renders the slot B", "@kgen.template",
    ),
    "no head": ("{{ kernel() }}", "import triton", "never opens the kernel", "@kgen.template"),
    "a store that is none": (
        '{{ C.store("acc", "b", "rm", "rn") }}', "x: {{ C.type }} = acc", "never stores a result", "@kgen.template",
    ),
    "an unknown name": ("{{ kernel() }}", "{{ kernel() }}\n    {{ C_out }}", "uses C_out: no slot", "{{ C_out }}"),
    "a misspelled slot": ("{{ B.tile(", "{{ D.tile(", "never renders the slot B, but D", "@kgen.template"),
    "a step that is none": ("{{ kernel() }}", "{{ kernel() }}\n    {{ scores.apply('s') }}", "uses scores", "{{ scores"),
    "syntax": ("{{ kernel() }}", "{{ kernel() }}\n{% iff %}", "unknown tag 'iff'", "{% iff"),
}  # fmt: skip
# Uses of slots, which are seen when a kernel is rendered.
SLOTS = {
    "an index too few": ('A.tile("left", "b", "rm", "rk")', 'A.tile("left", "b", "rm")', "A.tile"),
    "an index too many": ('A.tile("left", "b", "rm", "rk")', 'A.tile("left", "b", "rm", "rk", "rk")', "A.tile"),
    "a method that is none": ('A.tile("left", "b", "rm", "rk")', 'A.load("left", "b", "rm", "rk")', "A.load"),
    "a keyword that is none": ('A.tile("left", "b", "rm", "rk")', 'A.tile("left", "b", "rm", "rk", mask=1)', "A.tile"),
    "a store with an index too few": ('C.store("acc", "b", "rm", "rn")', 'C.store("acc", "b", "rm")', "C.store"),
    "a store along no axis": ('C.store("acc", "b", "rm", "rn")', 'C.store("acc", "b", "rm", "rn", x="16")', "C.store"),
    "a store without a tile": ('C.store("acc", "b", "rm", "rn")', "C.store()", "C.store"),
    "an attribute of an axis": ("{{ kernel() }}", "{{ kernel() }}\n    # {{ k.length }}", "k.length"),
    "a knob of config": ("{{ kernel() }}", "{{ kernel() }}\n    # {{ config.BLOCK_X }}", "config.BLOCK_X"),
}
# Methods, which are seen when they are called.
METHODS = {
    "refuse returns True": "    def refuse(self, problem):\n        return True\n",
    "refuse returns False": "    def refuse(self, problem):\n        return False\n",
    "refuse returns an empty text": "    def refuse(self, problem):\n        return ''\n",
    "configs offers none": "    def configs(self, problem):\n        return ()\n",
    "refuse raises": "    def refuse(self, problem):\n        return problem.is_square\n",
    "configs raises": "    def configs(self, problem):\n        yield {'BLOCK_M': 1 // 0}\n",
    "resources raises": "    def resources(self, problem, config):\n        return config.BLOCK_Q\n",
    "seconds raises": "    def seconds(self, problem, config):\n        raise ValueError('nobody knows')\n",
    "grid raises": "    def grid(self, problem, config):\n        return problem.tiles('q', 16)\n",
    "configs returns a number": "    def configs(self, problem):\n        return 3\n",
    "configs gives numbers": "    def configs(self, problem):\n        return [3]\n",
    "configs has a block that is no power of two": "    def configs(self, problem):\n        yield dict(BLOCK_M=48)\n",
    "configs has a text for a number": "    def configs(self, problem):\n        yield dict(BLOCK_M='48')\n",
    "resources returns a dict": "    def resources(self, problem, config):\n        return dict(shared=3)\n",
    "configs names no knob": "    def configs(self, problem):\n        yield dict(BLOCK_Q=3)\n",
}


def test_there_are_enough() -> None:
    assert len(DECLARATIONS) + len(SOURCES) + len(SLOTS) + len(METHODS) >= 37


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    yield
    registry.remove(NAME)


def registered(folder: Path, module: str = MODULE, jinja: str = JINJA, methods: str = "") -> Path:
    path = template_author.write(folder, NAME, jinja, module, methods)
    template_author.load(path)
    return path


def shown_line(message: str) -> str:
    """The text of the line that a message names."""
    place = re.search(r"\((/[^,]+), line (\d+)\)", message)
    assert place, message
    return Path(place[1]).read_text().splitlines()[int(place[2]) - 1]


@pytest.mark.parametrize("what", DECLARATIONS)
def test_a_wrong_declaration(tmp_path: Path, what: str) -> None:
    old, new, message = DECLARATIONS[what]
    assert old in MODULE
    with pytest.raises((errors.BadTemplate, TypeError)) as caught:
        registered(tmp_path, MODULE.replace(old, new))
    assert message in str(caught.value)
    if isinstance(caught.value, errors.BadTemplate):  # Python's own errors have the line in their traceback
        assert ("kgen.operand(" if what == "a number for an axis" else "@kgen.template") in shown_line(str(caught.value))
    assert NAME not in registry.names()


@pytest.mark.parametrize("what", SOURCES)
def test_a_wrong_source(tmp_path: Path, what: str) -> None:
    old, new, message, line = SOURCES[what]
    assert old in JINJA
    with pytest.raises(errors.BadTemplate, match=NAME) as caught:
        registered(tmp_path, jinja=JINJA.replace(old, new))
    assert message in str(caught.value)
    assert line in shown_line(str(caught.value))


def compiled() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    with only(NAME, lambda configs: configs[0]), config.override(gpu_interpreter=True, cache=False, strict=True):
        torch.compile(f, backend=kgen_backend)(torch.ones(1, 32, 16), torch.ones(1, 16, 32))


@pytest.mark.parametrize("what", SLOTS)
def test_a_wrong_use_of_a_slot(tmp_path: Path, what: str) -> None:
    old, new, line = SLOTS[what]
    assert old in JINJA
    registered(tmp_path, jinja=JINJA.replace(old, new))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled()
    error = caught.value.inner_exception
    assert isinstance(error, errors.BadSlot), error
    assert NAME in str(error)
    assert line in shown_line(str(error))


@pytest.mark.parametrize("what", METHODS)
def test_a_wrong_method(tmp_path: Path, what: str) -> None:
    registered(tmp_path, methods=METHODS[what])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled()
    error = caught.value.inner_exception
    assert isinstance(error, errors.BadTemplate), error
    assert NAME in str(error)
    line = shown_line(str(error))
    assert line.strip() in METHODS[what]
    assert ("def " in line) != what.endswith(" raises")  # the line that raises, or the method


@pytest.mark.parametrize("given", ["self", "self, problem, config", "self, problem, *, strict"])
def test_a_method_that_cannot_be_called(tmp_path: Path, given: str) -> None:
    """It is seen when the template is declared: a matmul need not meet it first."""
    with pytest.raises(errors.BadTemplate, match=r"refuse is called with \(problem\): (missing|too many)") as caught:
        registered(tmp_path, methods=f"    def refuse({given}):\n        return None\n")
    assert NAME in str(caught.value)
    assert "def refuse" in shown_line(str(caught.value))


def test_a_right_template_compiles(tmp_path: Path) -> None:
    registered(tmp_path)
    compiled()


def test_the_name_of_one_of_kgens_own_is_taken_before_that_is_loaded() -> None:
    """Else the mistake is found where kgen's own is registered, in some later compilation."""
    script = textwrap.dedent(
        """
        from kgen import errors
        from kgen.templates import registry
        assert not registry._templates
        class One:
            name = "triton_matmul"
            author = object()
        try:
            registry.add(One)
        except errors.DuplicateTemplate as error:
            print("taken", error)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("taken"), done.stderr
