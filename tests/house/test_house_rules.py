"""Rules of the house that a test can see: no bags of attributes, no decisions on names."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kgen", "lowering", "scheduler", "templates")
# What the driver of the scheduler may have, and in how many files of the scheduler nodes are told apart by these classes.
MOST_LINES, MOST_IMPORTS, MOST_FILES = 150, 12, 3
TEMPLATE_NODES = {"Contraction", "Operation", "Attention", "TemplateNode"}
# What takes a name apart, and what holds the name of a buffer, a kernel or a node.
PARSERS = {"split", "rsplit", "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}
NAMES = {
    "name", "names", "out", "outs", "buffer", "buffers", "source", "target", "stem", "accumulator", "producer", "consumer",
    "symbol", "of", "into", "alias_of", "map",
}  # fmt: skip
# Names of other things, each with what it is.
ALLOWED = {
    "place.name.startswith('.')": "a file",
    "name.split('.', 2)": "a counter",
    "name.startswith(prefix)": "a counter",
    "name.startswith('cache.hit.')": "a counter",
    "name.startswith(_EXTERN)": "a counter",
    "name.removeprefix(_EXTERN)": "a counter",
    "name.startswith(_REPLACED)": "a counter",
    "name.removeprefix(_REPLACED)": "a counter",
    "target._schema.name.split('::')": "an operator and its namespace",
    "value._schema.name.split('::')": "an operator and its namespace",
    "target._schema.name.startswith(_EMPTY)": "an operator",
    "name.rpartition('.')": "an operator and its overload",
    "name.removeprefix('OpaqueUnaryFn_')": "a function of sympy",
    "target.partition(':')": "an argument of the command line",
    "target.endswith('.py')": "an argument of the command line",
    "stem.split('_')": "an argument of the command line",
    "'.' in name": "an operator and its namespace, as a user names it",
    "name.partition('::')": "an operator and its namespace, as a user names it",
    "name.startswith('KGEN_')": "an environment variable",
    "name.startswith(TEST_VARIABLES)": "an environment variable",
    "name.split('.')": "an attribute that the command line names",
    "re.match('graph_(\\\\d+)_', p.name)": "a folder for people",
    "name.endswith('>')": "a column of a table",
    "name.startswith('BLOCK_')": "a knob",
    "tile.name.split()": "several slots in one argument",
    "name.startswith('_')": "a member of an author's class",
    "name.startswith('__kgen_')": "a variable of a user's function, or one that its conversion adds",
    "name.startswith(_PREFIX)": "a variable of a user's function, or one that its conversion adds",
    "name.endswith('_')": "a method of torch's that writes in place",
    "name.endswith('__')": "a method of Python's",
    "name.split('+')": "axes of a window in a pattern",
    "'+' in name": "axes of a window in a pattern",
    "names.split('+')": "axes of a window in a pattern",
    "stem[:1]": "the name of a variable in a script, which may not begin with a digit",
    "stem.rpartition('_v')": "a fresh name is not made of a fresh name",
}


def source_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in source_files():
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def last_name(node: ast.expr) -> str:
    """The name of a variable, or of the attribute that is read."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def parsed_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where text is taken out of a name, or looked for in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [node.func.value] if node.func.attr in PARSERS else []
            texts += node.args[1:] if ast.unparse(node.func.value) == "re" else []
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant):
            texts = node.comparators if isinstance(node.left.value, str) else []
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            texts = [node.value] if last_name(node.value) in ("name", "stem", "symbol") else []
        else:
            continue
        if any(last_name(text) in NAMES for text in texts):
            yield node.lineno, ast.unparse(node)


def test_no_name_of_a_buffer_is_taken_apart() -> None:
    """What a buffer is stands in a field: an operator of a user may be called like anything that kgen adds."""
    found = [(path, line, text) for path, tree in trees() for line, text in parsed_names(tree)]
    assert [f"{path}:{line}: {text}" for path, line, text in found if text not in ALLOWED] == []
    assert ALLOWED.keys() - {text for _, _, text in found} == set(), "these are no longer there"


@pytest.mark.parametrize(
    "code",
    [
        "kernel.name.endswith('_sum')",
        "out.removesuffix('_parts')",
        "graph.buffers[x].name.split('_')",
        "'_cut' in name",
        "re.sub('_v[0-9]+', '', buffer)",
        "name[:-4]",
    ],
)
def test_what_takes_a_name_apart_is_seen(code: str) -> None:
    assert [text for _, text in parsed_names(ast.parse(code))] == [code]


def test_what_takes_no_name_apart_is_not_seen() -> None:
    code = "text.split(','), name in names, 'x' in options, sizes[:2], re.sub('a', 'b', text)"
    assert list(parsed_names(ast.parse(code))) == []


def test_no_private_function_of_torch_for_gpus_is_used() -> None:
    """They come and go with torch's versions, and are not in its builds for CPUs: no test on a CPU sees one missing."""
    reads = (node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    assert [text for node in reads if (text := ast.unparse(node)).startswith(("torch._C._cuda", "torch.cuda._"))] == []


def test_there_are_no_bags_of_attributes() -> None:
    """A class says what a slot has."""
    bags = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) == "SimpleNamespace"
    ]
    assert bags == []


def test_the_driver_of_the_scheduler_is_small() -> None:
    text = (ROOT / "scheduler" / "schedule.py").read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    own = [ast.unparse(node) for node in imports if ast.unparse(node).startswith(("from kgen", "import kgen"))]
    assert len(text.splitlines()) <= MOST_LINES
    assert len(own) <= MOST_IMPORTS, own


def test_few_files_of_the_scheduler_ask_for_the_class_of_a_contraction() -> None:
    """What a node is for, the IR says: `is_contraction`, `is_template_node`, `call_of`."""
    found = {
        path
        for path, tree in trees()
        for node in ast.walk(tree)
        if path.startswith("scheduler/") and isinstance(node, ast.Call) and last_name(node.func) == "isinstance"
        for kind in ast.walk(node.args[1])
        if isinstance(kind, ast.Name | ast.Attribute) and last_name(kind) in TEMPLATE_NODES
    }
    assert len(found) <= MOST_FILES, sorted(found)


def test_types_of_stages_are_known() -> None:
    """What a stage takes and makes is said by its type, in the list of stages and where each one is defined."""
    tree = ast.parse((ROOT / "kgen" / "backend.py").read_text())
    [listed] = [node for node in tree.body if isinstance(node, ast.AnnAssign) and last_name(node.target) == "STAGES"]
    assert isinstance(listed.value, ast.Tuple)
    names = {last_name(one) for one in listed.value.elts}
    both = ast.parse((ROOT / "kgen" / "pipeline.py").read_text()).body + tree.body
    defined = [node for node in both if isinstance(node, ast.FunctionDef) and node.name in names]
    types: list[ast.expr | None] = [listed.annotation]
    types += [one for node in defined for one in (*(arg.annotation for arg in node.args.args), node.returns)]
    assert len(defined) > len(names)
    assert [ast.unparse(one) for one in types if one is not None and "Any" in ast.unparse(one)] == []


def layer_of() -> dict[str, int]:
    """The layer of each package and top-level module of kgen, 0 on top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [one["layers"] for one in contracts if one.get("containers") == ["kgen"]]
    return {name.strip(): k for k, layer in enumerate(layers) for name in layer.split("|")}


def modules_named(tree: ast.Module) -> Iterator[str]:
    """The packages and modules of kgen whose names a file has as text, for imports at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(r"kgen\.(\w+)[\w.]*", node.value)
            if found is not None:
                yield found[1]


def test_imports_at_run_time_keep_to_the_layers() -> None:
    """import-linter sees no import by name."""
    layers = layer_of()
    rising = [
        f"{path}: {name}"
        for path, tree in trees()
        if path != "kgen/__init__.py"  # its public names
        for name in modules_named(tree)
        for own in [path.removeprefix("kgen/").split("/")[0].removesuffix(".py")]
        if name in layers and name != own and layers[name] <= layers[own]
    ]
    assert rising == []
