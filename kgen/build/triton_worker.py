"""The process that compiles Triton kernels: it imports Triton once and forks a child for each kernel.

Run by kgen/build/triton.py, never imported by it: the caller's process must not pay for Triton, nor die of its crashes. A job
is a folder with ``request.json``; its child leaves ``result.json`` and ``kernel.cubin`` there, or the reason in ``log``. Over
stdin come lines ``<number> <folder>``, over stdout go lines ``<number> <exit status>``, negative for a signal.

The server itself compiles nothing, so it stays without threads and can be forked safely. It ends when stdin closes or
its parent is gone (which another child of that parent may hide by holding on to the pipe).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from kgen.build.ptx import repaired
from kgen.rendered.tensor_map import map_block, map_rank, plain_kind, widths

_PARENT_CHECK_S = 5.0
_LIBRARY = "kgen.templates.triton.device.library"  # what kernels import


def serve() -> None:
    """Takes jobs until stdin closes."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not reach the answers
    problem = _import_triton()
    Server(replies, problem).run()


def _import_triton() -> str:
    """Everything that a child would otherwise import itself. Empty, or why Triton cannot be used."""
    try:
        import triton.backends.nvidia.compiler as nvidia  # noqa: PLC0415  the reason is sent to whoever asks for a kernel
        import triton.compiler.code_generator  # noqa: PLC0415
        import triton.language.extra.cuda.libdevice  # noqa: PLC0415, F401

        _skip_key()
        _repair_ptx(nvidia.CUDABackend)
        nvidia.get_ptxas(90).version  # noqa: B018  runs `ptxas --version`, whose answer children inherit
        if importlib.util.find_spec(_LIBRARY) is not None:
            importlib.import_module(_LIBRARY)
    except Exception:  # noqa: BLE001  a broken installation can raise anything
        return traceback.format_exc()
    return ""


def _skip_key() -> None:
    """Triton's own cache, which is empty here, wants a hash over all of Triton: six times what compiling a kernel takes."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            setattr(module, "triton_key", lambda: "not used")  # noqa: B010  not in the stubs of all versions


def _repair_ptx(backend: Any) -> None:
    """Every kernel goes to ptxas by way of `repaired`: Triton has no hook between the two in all versions."""
    made_by_triton = backend.make_ptx

    def make_ptx(*args: Any) -> str:
        return repaired(made_by_triton(*args))

    backend.make_ptx = make_ptx


class Server:
    def __init__(self, replies: int, problem: str) -> None:
        self.replies = replies
        self.problem = problem
        self.parent = os.getppid()
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, tuple[str, int]] = {}  # the pipe that closes when the child ends -> job, process
        self.waiting = b""

    def run(self) -> None:
        self.selector.register(0, selectors.EVENT_READ)
        try:
            while os.getppid() == self.parent:
                for key, _ in self.selector.select(_PARENT_CHECK_S):
                    if key.fd != 0:
                        self.reap(key.fd)
                    elif not self.read():
                        return
        finally:
            for _, process in self.children.values():
                _kill_group(process)

    def read(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self.waiting = (self.waiting + data).split(b"\n")
        for line in lines:
            number, _, folder = line.decode().partition(" ")
            self.start(number, Path(folder))
        return bool(data)

    def start(self, number: str, folder: Path) -> None:
        if self.problem:
            (folder / "log").write_text(self.problem, encoding="utf-8")
            self.reply(number, 1)
            return
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            run_job(folder)
        os.close(writer)
        self.children[reader] = number, process
        self.selector.register(reader, selectors.EVENT_READ)

    def reap(self, reader: int) -> None:
        number, process = self.children.pop(reader)
        self.selector.unregister(reader)
        os.close(reader)
        _, status = os.waitpid(process, 0)
        _kill_group(process)  # an assembler that outlived its time limit
        self.reply(number, os.waitstatus_to_exitcode(status))

    def reply(self, number: str, status: int) -> None:
        os.write(self.replies, f"{number} {status}\n".encode())


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


# ---- one job, in a child --------------------------------------------------------------------------------------------


def run_job(folder: Path) -> None:
    """Compiles the kernel in `folder` and ends the process."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        # it kills the process even inside LLVM, where no Python handler runs
        signal.setitimer(signal.ITIMER_REAL, request["time_limit_s"])
        tempfile.tempdir = str(folder)
        compile_kernel(folder, request)
        status = 0
    except BaseException as error:  # noqa: BLE001  the log tells the parent; a child must never go on as a second server
        traceback.print_exc()
        sys.stderr.write(place_in_template(error))
        sys.stderr.flush()
    os._exit(status)


_PLACE = re.compile(r'^# (\d+) "(.+?)"( slot)?$')


def place_in_template(error: BaseException | None) -> str:
    """Of an error of Triton's front end, the file and line of the template, where the kernel's text names them
    (`kgen.templates.render.with_line_marks`)."""
    found = ""
    while error is not None:
        text, node = getattr(error, "src", None), getattr(error, "node", None)
        if isinstance(text, str):
            found = place_of_line(text, getattr(node, "lineno", 0)) or found
        error = error.__cause__ or error.__context__
    return found


def place_of_line(text: str, number: int) -> str:
    """The file and line of a template that a line of a kernel's text, from 1, is of; empty where it names none."""
    marks = [(k, match) for k, line in enumerate(text.splitlines()[:number]) if (match := _PLACE.match(line))]
    if not marks:
        return ""
    at, match = marks[-1]
    further = 0 if match[3] else number - at - 2
    return f"in the template: {match[2]}, line {int(match[1]) + further}\n"


def compile_kernel(folder: Path, request: dict[str, Any]) -> None:
    """Leaves the kernel's machine code and what a launch must know of it in `folder`."""
    import triton  # noqa: PLC0415  this module is imported to start a server that may have to report that Triton is broken
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    function = getattr(_module(folder / f"{request['name']}.py"), request["name"])
    signature = dict(zip(function.arg_names, map(plain_kind, request["signature"]), strict=True))
    attributes = {(k,): [["tt.divisibility", 16]] for k, multiple in enumerate(request["divisible"]) if multiple}
    options = {**dict(request["options"]), "num_warps": request["num_warps"], "num_stages": request["num_stages"]}
    options["launch_pdl"] = options.get("launch_pdl", False) and request["arch"] >= _HOPPER
    if function.is_gluon():
        source = _gluon_source(function, signature, attributes)
    else:
        source = ASTSource(function, signature, constexprs={}, attrs=attributes)
    target = GPUTarget("cuda", request["arch"], 32)
    made = triton.compile(source, target=target, options=options)
    if gives_up(made.asm["cubin"]) and options.get("maxnreg") is None:
        made = triton.compile(source, target=target, options={**options, "maxnreg": most_registers(request["num_warps"])})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    facts = _facts(made.metadata, made.asm["ptx"], request["signature"])
    (folder / "result.json").write_text(json.dumps(facts), encoding="utf-8")


def gives_up(cubin: bytes) -> bool:
    """Whether ptxas left a kernel few registers and keeps the rest in memory. Where not all values fit, ptxas of CUDA 12.8 goes
    down to 32 registers: kernels of 2 warps then had 7 KiB a thread in memory and took 25 times as long. Told how many there
    are it takes them all."""
    stack = max((int.from_bytes(size, "little") for size in _STACK.findall(cubin)), default=0)
    registers = max((int.from_bytes(count, "little") for count in _REGISTERS.findall(cubin)), default=0)
    return stack > _MUCH_STACK and registers <= _FEW_REGISTERS


def most_registers(warps: int) -> int:
    """Registers that a thread of a program of so many warps may have."""
    return min(255, 65536 // (32 * warps) // 8 * 8)


def _gluon_source(function: Any, signature: dict[str, str], attributes: dict[Any, Any]) -> Any:
    """The source of a kernel in Gluon. Its descriptors say how tiles lie in shared memory. Where Triton's own functions, which
    are called from there as well, make a tile without saying how threads hold it, that follows from what it meets."""
    from triton.experimental.gluon import language as gl  # noqa: PLC0415
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415
    from triton.experimental.gluon.language._semantic import GluonSemantic  # noqa: PLC0415

    for method in (GluonSemantic.arange, GluonSemantic.full):
        if list(inspect.signature(method).parameters)[-1] != "layout":
            raise ValueError("this version of Triton is not known to work with kernels in Gluon: triton==3.6 and 3.7 are")
        method.__defaults__ = (None,)
    names = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i8": gl.int8, "u8": gl.uint8}
    names |= {"fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5, "i32": gl.int32}
    known = {}
    for name, kind in signature.items():
        element, block = map_block(kind)
        known[name] = kind
        if block:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), names[element])
            known[name] = f"tensordesc<{element}{list(block)},{layout!r}>"
    return GluonASTSource(function, known, {}, attributes)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _facts(metadata: Any, ptx: str, signature: list[str]) -> dict[str, Any]:
    unusual = [what for what, no in _UNUSUAL.items() if getattr(metadata, what, no) != no]
    if unusual:
        raise ValueError(f"the launcher does not support {', '.join(unusual)}")
    scratch = [metadata.global_scratch_size, getattr(metadata, "profile_scratch_size", 0)]
    maps = [_map_format(meta) for meta in getattr(metadata, "tensordesc_meta", None) or ()]
    if len(maps) != sum(map_rank(kind) > 0 for kind in signature):
        raise ValueError("TMA descriptors need compute capability 9.0 or higher")
    own, found = [bytes_ for kind in signature for bytes_ in widths(kind)], _parameter_bytes(ptx)
    # The parameters of a descriptor and the trailing ones may differ between versions of Triton: they are read, not assumed.
    trailing = len(found) - len(own)
    if found[: len(own)] != own:
        raise ValueError(f"the launcher passes parameters of {own} bytes, the kernel has parameters of {found} bytes")
    if not 0 <= trailing <= len(scratch) or any(scratch[trailing:]):
        raise ValueError(f"the kernel has {trailing} parameters for scratch memory of {scratch} bytes")
    return {
        "function": metadata.name,
        "warps": metadata.num_warps,
        "shared": metadata.shared,
        "scratch": scratch[:trailing],
        "maps": maps,
        # launched early, a kernel that does not wait would compute with what is not there yet
        "early": metadata.launch_pdl and "griddepcontrol.wait" in ptx,
    }


def _parameter_bytes(ptx: str) -> list[int]:
    """The size of each parameter of the kernel in `ptx`."""
    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    assert entry is not None
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^\[,]*(?:\[(\d+)\])?", entry.group(1))
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


# Triton names element types by the numbers that tensormap.replace takes, which are the driver's but for these.
_DRIVER_ELEMENT = {8: 10, 9: 8, 10: 9}


def _map_format(meta: dict[str, Any]) -> tuple[dict[str, int], list[int]]:
    """The fields of a `MapFormat`, and its box."""
    if meta["fp4_padded"]:
        raise ValueError("the launcher does not support TMA descriptors of 4-bit floats")
    element = meta["elem_type"]
    fields = {"element": _DRIVER_ELEMENT.get(element, element), "element_bytes": meta["elem_size"], "swizzle": meta["swizzle"]}
    return fields, meta["block_size"]


_HOPPER = 90
# What a cubin says of a function: an attribute's format and number, 8 bytes, the function's symbol, and the value.
_STACK = re.compile(rb"\x04\x12\x08\x00.{4}(.{4})", re.DOTALL)
_REGISTERS = re.compile(rb"\x04\x2f\x08\x00.{4}(.{4})", re.DOTALL)
_MUCH_STACK, _FEW_REGISTERS = 128, 64
_UNUSUAL = {"num_ctas": 1, "launch_cooperative_grid": False}
