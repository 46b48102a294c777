"""The command line, called as functions; once as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import kgen
from kgen import cache
from kgen.cli import main, parse
from kgen.commands import doctor
from kgen.templates import registry

pytestmark = pytest.mark.cpu

SCRIPT = """
import sys
import torch

print("arguments", sys.argv[1:])

@torch.compile(backend="kgen")
def f(x):
    return torch.softmax(x * 2, -1)

if __name__ == "__main__":
    f(torch.randn(4, 8))
"""

MODULE = """
import torch

def fails():
    return torch.ones(3) @ torch.ones(4)

def needs(x):
    return x

def direct():
    return torch.ones(4, 8).exp().sum(-1)

def model():
    return torch.nn.Linear(8, 2), torch.randn(4, 8)

class Inside:
    @staticmethod
    def again():
        return torch.ones(3).cos()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "explained_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "explained_module", raising=False)
    return tmp_path


def test_explain_a_script(folder, capsys):
    path = list(sys.path)
    assert main(["explain", "script.py", "one", "--two"]) == 0
    out = capsys.readouterr().out
    assert "arguments ['one', '--two']" in out
    assert "1 graph, 1 kernel" in out
    assert "script.py:9" in out
    assert sys.path == path


def test_explain_twice_still_compiles(folder, capsys):
    for _ in range(2):
        assert main(["explain", "--source", "script.py"]) == 0
        assert 'extern "C" int' in capsys.readouterr().out


def test_explain_as_json(folder, capsys):
    assert main(["explain", "--json", "script.py"]) == 0
    out, err = capsys.readouterr()
    assert "arguments" in err
    assert json.loads(out)["graphs"][0]["kernels"][0]["operators"]


@pytest.mark.parametrize(("function", "text"), [("direct", "exp"), ("model", "addmm"), ("Inside.again", "cos")])
def test_explain_a_function(folder, capsys, function, text):
    assert main(["explain", f"explained_module:{function}"]) == 0
    assert text in capsys.readouterr().out


def test_explain_writes_a_page(folder, capsys):
    assert main(["explain", "script.py", "--html", "out.html"]) == 0
    assert "out.html: <kgen report: 1 graph, 1 kernel" in capsys.readouterr().out
    assert (folder / "out.html").read_text().startswith("<!doctype html>")
    assert main(["explain", "script.py", "--html", "missing/out.html"]) == 2
    assert "missing/out.html cannot be written" in capsys.readouterr().err


def test_explain_one_kernel(folder, capsys):
    assert main(["explain", "script.py", "--kernel", "0"]) == 0
    printed = capsys.readouterr().out
    assert "aten.exp#0" in printed
    assert 'extern "C"' in printed
    assert main(["explain", "script.py", "--kernel", "7"]) == 2
    assert "there is no kernel '7'" in capsys.readouterr().err


def test_explain_why(folder, capsys):
    assert main(["explain", "script.py", "--why", "exp"]) == 0
    assert "because" in capsys.readouterr().out
    assert main(["explain", "script.py", "--why", "expp"]) == 2
    assert "no verdict is about expp; did you mean" in capsys.readouterr().err
    assert main(["explain", "script.py", "--why", "a", "b", "c"]) == 2
    assert main(["explain", "script.py", "--top", "0"]) == 2


def test_explain_in_a_mode(folder, capsys):
    assert main(["explain", "script.py", "--mode", "default", "--top", "3"]) == 0
    assert main(["explain", "script.py", "--mode", "fastest"]) == 1
    assert "fastest" in capsys.readouterr().err


def test_explain_says_what_is_wrong(folder, capsys):
    (folder / "nothing.py").write_text("x = 1\n")
    assert main(["explain", "nothing.py"]) == 1
    assert "nothing was compiled" in capsys.readouterr().err
    assert main(["explain", "missing.py"]) == 2
    assert main(["explain", "neither"]) == 2
    assert "neither script.py nor module:function" in capsys.readouterr().err
    (folder / "fails.py").write_text("raise SystemExit(3)\n")
    assert main(["explain", "fails.py"]) == 1
    assert "exit code 3" in capsys.readouterr().err


def test_cache_commands(fresh_cache, capsys):
    cache.put("graph", "one", b"x" * 5000)
    cache.put("other", "two", b"x" * 100)
    assert main(["cache", "stats"]) == 0
    out = capsys.readouterr().out
    assert str(fresh_cache) in out
    assert "graph         1 entries" in out
    assert main(["cache", "list", "--kind", "graph"]) == 0
    out = capsys.readouterr().out
    assert "one" in out
    assert "two" not in out
    assert main(["cache", "clear", "--kind", "other"]) == 0
    assert "removed 1 entries" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert cache.list_entries() == []


def test_an_unwritable_cache_is_an_error_with_advice(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "file"))
    assert main(["cache", "stats"]) == 1
    assert "set KGEN_CACHE_DIR" in capsys.readouterr().err


def test_doctor_on_a_machine_in_order(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "this machine is ready" in out
    for name in (
        "C++ compiler",
        "instruction set",
        "cache folder",
        "kernel header",
        "OpenMP",
        "torch",
        "triton",
        "a compilation",
    ):
        assert f"ok    {name}:" in out or f"note  {name}:" in out


def test_doctor_finds_what_is_broken(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KGEN_CXX", "no-such-compiler")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "file"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BAD   C++ compiler: no C++ compiler found" in out
    assert "set KGEN_CXX to a compiler" in out
    assert "BAD   cache folder" in out
    assert "set KGEN_CACHE_DIR" in out
    assert "BAD   a compilation: no C++ compiler found" in out
    assert "this check itself failed" not in out


def test_doctor_survives_a_check_that_fails(monkeypatch):
    def broken(name):
        raise RuntimeError("surprise")

    monkeypatch.setattr(doctor, "_CHECKS", {"something": broken})
    [check] = doctor.checks()
    assert check.status == doctor.BAD
    assert "surprise" in check.found


def test_two_openmp_libraries_are_seen():
    maps = textwrap.dedent("""\
        7f00-7f01 r-xp 00000000 08:01 1   /usr/lib/libgomp.so.1
        7f01-7f02 r--p 00000000 08:01 1   /usr/lib/libgomp.so.1
        7f02-7f03 r-xp 00000000 08:01 2   /opt/torch libs/libiomp5-abc.so
        7f03-7f04 rw-p 00000000 00:00 0
    """)
    assert doctor.loaded_openmp(maps) == ["/opt/torch libs/libiomp5-abc.so", "/usr/lib/libgomp.so.1"]


def test_wrong_use_exits_with_two():
    with pytest.raises(SystemExit) as end:
        main(["unknown"])
    assert end.value.code == 2


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kgen", "tune", "missing.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kgen: there is no script missing.py\n"


@pytest.mark.parametrize(
    ("line", "options", "arguments"),
    [
        ("explain --json script.py one", {"json": True, "source": False}, ["one"]),
        ("explain script.py one --two 3 four --json", {"json": True, "source": False}, ["one", "--two", "3", "four"]),
        ("explain script.py --json --source", {"json": True, "source": True}, []),
        ("explain script.py --source -- --json -x", {"json": False, "source": True}, ["--json", "-x"]),
        ("tune --seconds 5 script.py --lr 3 x --file t.json", {"seconds": 5.0}, ["--lr", "3", "x"]),
    ],
)
def test_flags_may_come_in_any_order(line, options, arguments):
    found = parse(line.split())
    assert {name: getattr(found, name) for name in options} == options
    assert str(found.target) == "script.py"
    assert found.arguments == arguments


def test_a_flag_that_no_command_has_is_wrong_use(capsys):
    with pytest.raises(SystemExit) as end:
        main(["cache", "stats", "--jsn"])
    assert end.value.code == 2
    assert "unrecognized arguments: --jsn" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"kgen {kgen.__version__}\n"


def test_help_is_there_at_once():
    """CPU seconds, since a busy machine makes everything slow; and what takes long is not imported."""
    code = """
import sys, time
try:
    from kgen.cli import main
    main(["--help"])
except SystemExit as end:
    heavy = {"torch", "sympy", "numpy", "triton", "rich", "jinja2"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else f"{time.process_time()} seconds" if time.process_time() > 0.3 else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout


def test_doctor_as_json(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_CHECKS", {name: doctor._CHECKS[name] for name in ("Python", "torch", "GPU", "CUDA driver")})
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    assert [check["name"] for check in report["checks"]] == ["Python", "torch", "GPU", "CUDA driver"]
    assert all(check["found"] for check in report["checks"])


def test_doctor_sees_a_driver_that_is_too_old(monkeypatch):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(number):
            number._obj.value = 11080
            return 0

    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: Driver)
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    check = doctor._driver("CUDA driver")
    assert (check.status, check.found) == (doctor.BAD, "runs CUDA up to 11.8; torch is built for 13.0")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_module:f", "there is no module no_such_module"),
        ("explained_module:absent", "has no attribute 'absent'"),
        ("explained_module:torch", "is no function"),
        ("explained_module:needs", "let a function without arguments return (callable, argument, ...)"),
    ],
)
def test_a_wrong_target_is_one_line(folder, capsys, target, text):
    assert main(["explain", target]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_what_a_script_raises_is_shown_from_its_own_frame_on(folder, capsys):
    (folder / "raises.py").write_text("def f():\n    raise ValueError('mine')\n\nf()\n")
    assert main(["explain", "raises.py"]) == 1
    err = capsys.readouterr().err
    assert "ValueError: mine" in err
    assert 'raises.py", line 2, in f' in err
    assert "kgen/commands" not in err
    assert "runpy" not in err


def test_a_script_with_a_wrong_option_gets_the_sentence_alone(folder, capsys):
    (folder / "wrong.py").write_text(SCRIPT.replace('backend="kgen"', 'backend="kgen", options={"fuse": 1}'))
    assert main(["explain", "wrong.py"]) == 1
    err = capsys.readouterr().err
    assert "kgen: kgen has no option 'fuse'" in err
    assert "Traceback" not in err


def test_what_a_function_raises_is_shown_from_its_own_frame_on(folder, capsys):
    assert main(["explain", "explained_module:fails"]) == 1
    err = capsys.readouterr().err
    assert err.count("File ") == 1
    assert 'explained_module.py", line 5, in fails' in err


@pytest.mark.parametrize(
    ("module", "text"),
    [("absent_module", "there is no module absent_module"), ("failing_module", "ZeroDivisionError: division by zero (")],
)
@pytest.mark.parametrize(
    "line", [["bisect", "script.py"], ["templates", "list"], ["templates", "show", "x"], ["templates", "why", "x", "script.py"]]
)
def test_a_module_that_cannot_be_imported_is_named(folder, capsys, line, module, text):
    (folder / "failing_module.py").write_text("x = 1 / 0\n")
    assert main([*line, "--module", module]) == 1
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("line", [["explain", "ends.py"], ["bisect", "--in-process", "ends.py"], ["tune", "ends.py"]])
def test_a_script_that_ends_too_soon_is_not_said_to_lack_graphs(folder, capsys, line, monkeypatch):
    monkeypatch.setenv("KGEN_TUNING_FILE", str(folder / "tuning.json"))
    (folder / "ends.py").write_text("raise ValueError('mine')\n")
    assert main(line) == 1
    err = capsys.readouterr().err
    assert "the script ended with this error" in err
    assert "nothing was" not in err


@pytest.mark.parametrize("action", ["list", "stats", "clear"])
def test_an_unknown_kind_of_entries_is_noted(fresh_cache, capsys, action):
    assert main(["cache", action, "--kind", "tunning"]) == 0
    assert "there is nothing of kind 'tunning'; kinds are" in capsys.readouterr().err


def test_a_new_template_has_a_name_that_can_be_imported(folder, capsys):
    assert main(["templates", "new", "class"]) == 2
    assert "'class' is no name of a module" in capsys.readouterr().err


def test_a_template_of_a_file_here_that_was_not_imported(folder, capsys):
    (folder / "my_gemm.py").write_text("")
    assert main(["templates", "show", "my_gemm"]) == 1
    assert "add --module my_gemm" in capsys.readouterr().err


def test_a_new_template_in_cpp_is_right(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    assert main(["templates", "new", "my_norm", "--device", "cpu"]) == 0
    assert "wrote my_norm.py and my_norm.cpp.jinja; `kgen templates check my_norm --module my_norm`" in capsys.readouterr().out
    try:
        asked = ["--only", "size 'n=53'", "--only", "'gelu' of (float32", "--configs", "1"]
        assert main(["templates", "check", "my_norm", "--module", "my_norm", *asked]) == 0
        assert "2 passed, 0 failed" in capsys.readouterr().out
        assert main(["templates", "check", "my_norm", "--module", "my_norm", "--only", "size 'q="]) == 1
        assert 'no problem has "size \'q=" in its text' in capsys.readouterr().err
        assert main(["templates", "show", "my_norm"]) == 0
        assert "derives from" not in capsys.readouterr().out, "the base class's own text"
    finally:
        registry.remove("my_norm")
        sys.modules.pop("my_norm", None)


# ---- completion ---------------------------------------------------------------------------------------------------------


def completed(*words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _kgen; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", f'eval "$({sys.executable} -m kgen completion bash)"; {ask}'], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_bash_completes_commands_actions_and_flags():
    assert completed("kgen", "t") == {"templates", "tune"}
    assert completed("kgen", "templates", "") >= {"list", "show", "check", "new", "why", "--help"}
    assert completed("kgen", "templates", "check", "--o") == {"--only"}
    assert completed("kgen", "bisect", "--mode=x", "--j") == set()  # what is hidden from the help is hidden here
    assert completed("kgen", "cache", "list", "script.py") == set()  # files are left to the shell


def test_other_shells_get_every_command(capsys):
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("explain", "doctor", "suggest", "why"))
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["exlpain", "a.py"], "did you mean 'explain'"),
        (["templates", "lst"], "did you mean 'list'"),
        (["completion", "fishh"], "did you mean 'fish'"),
        (["doctor", "--jsn"], "did you mean '--json'"),
        (["--vresion"], "did you mean '--version'"),
        (["--jsn"], "unrecognized arguments: --jsn"),
        (["bisect", "a.py", "--trials", "0"], "no number from 1 on"),
        (["bisect", "a.py", "--seconds", "nan"], "no number of seconds"),
        (["templates", "check", "cpp_matmul", "--configs", "x"], "no number from 1 on"),
        (["templates", "check", "cpp_matmul", "--seconds", "-1"], "no number of seconds"),
    ],
)
def test_wrong_use_says_what_is_like_it(capsys, line, text):
    with pytest.raises(SystemExit) as end:
        parse(line)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("--json doctor", "doctor --json"),
        ("--top 3 explain a.py", "explain a.py --top 3"),
        ("--kind tuning cache list", "cache list --kind tuning"),
        ("cache --kind tuning list", "cache list --kind tuning"),
        ("explain a.py templates list", "explain a.py -- templates list"),
    ],
)
def test_flags_may_be_in_front(line, same):
    drop = ("parser",)
    found, wanted = ({k: v for k, v in vars(parse(text.split())).items() if k not in drop} for text in (line, same))
    assert found == wanted


def test_a_misspelled_flag_before_a_script_is_noted(capsys):
    options = parse(["explain", "a.py", "--jsn"])
    assert options.arguments == ["--jsn"]
    assert "did you mean '--json'" in capsys.readouterr().err
    parse(["explain", "a.py", "--learning-rate", "1", "--", "--jsn"])
    assert capsys.readouterr().err == ""


def test_a_file_where_a_templates_name_is_wanted(capsys):
    assert main(["templates", "show", "mine.py"]) == 1
    assert "--module mine" in capsys.readouterr().err
    assert main(["templates", "show", "triton_matmull"]) == 1
    assert "did you mean 'triton_matmul'" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "text"), [("none/page.html", "no folder none"), (".", "a folder")])
def test_a_page_that_cannot_be_written_is_known_before_the_script_runs(folder, capsys, file, text):
    (folder / "runs.py").write_text("raise SystemExit('it ran')")
    assert main(["explain", "runs.py", "--html", file]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "it ran" not in err


def test_names_that_verdicts_are_about_are_listed(folder, capsys):
    assert main(["explain", "script.py", "--why", "zzz"]) == 2
    assert "they are about" in capsys.readouterr().err
