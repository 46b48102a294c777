"""Every error kgen raises on purpose: one class per mistake, its message as class data.

`UserError` means that the caller can fix it and the message says how; `InternalError` means a bug in kgen.
"""

from __future__ import annotations

import sys
from typing import Any


class KgenError(Exception):
    """Base of all. Subclasses give `template`, filled from keyword arguments, and `hint`, the next thing to try."""

    template = "{message}"
    hint = ""

    def __init__(self, **details: Any) -> None:
        self.details = details
        text = self.template.format(**details)
        hint = self.hint.format(**details)
        self.text = text
        super().__init__(f"{text}\n  try: {hint}" if hint else text)

    def __reduce__(self) -> Any:
        return (_rebuild, (type(self), self.details))


def _rebuild(kind: type[KgenError], details: dict[str, Any]) -> KgenError:
    return kind(**details)


class UserError(KgenError):
    """The program, the options or the machine's set-up need a change."""


class InternalError(KgenError):
    """A bug in kgen: please report it with the text of the message."""


class UnsupportedPlatform(UserError):
    template = "kgen runs on Linux, and this is {platform}"
    hint = "use a Linux machine or container (on Windows: WSL 2)"


class UnknownMode(UserError):
    template = "kgen has no mode {mode!r}"
    hint = "{near}use one of: {valid}"


class UnknownOption(UserError):
    template = "kgen has no option {option!r}"
    hint = "{near}use one of: {valid}"


class UnknownVariable(UserError):
    template = "kgen reads no environment variable {variable}"
    hint = "{near}use one of: {valid}"


class OptionAssigned(UserError):
    template = "kgen.config.{option} cannot be assigned: a compilation gets its options from its call"
    hint = "use `with kgen.config.override({option}=...)`, or the options of torch.compile"


class UnknownOperator(UserError):
    template = "{where} names the operator {operator!r}, and there is none of that name"
    hint = "{near}an operator is named as in torch.ops, such as 'aten.mm', with or without its overload"


class BadOptionValue(UserError):
    template = "option {option!r} cannot be {value!r}"
    hint = "{expected}"


class FreezingInTraining(UserError):
    template = "the option freezing is for inference, and this graph computes gradients"
    hint = "call the compiled module under torch.no_grad() or torch.inference_mode(), or leave the option out"


class CompilerNotFound(UserError):
    template = "no C++ compiler found (looked for {looked_for})"
    hint = "install g++ 11 or newer, or set KGEN_CXX to a compiler"


class CompilerTooOld(UserError):
    template = "{compiler} is version {version}; kgen needs {minimum} or newer"
    hint = "install a newer g++, or set KGEN_CXX to one"


class CacheNotWritable(UserError):
    template = "the cache folder {path} cannot be written ({cause})"
    hint = "set KGEN_CACHE_DIR to a folder you can write to"


class FallbackWarning(RuntimeWarning):
    """kgen could not compile a part of a graph: PyTorch's operators run instead."""


class NothingCompiledWarning(RuntimeWarning):
    """`require_fused` or `forbid_fused` saw no graph: nothing was compiled inside."""


class KernelBuildFailed(InternalError):
    template = "the C++ compiler failed on kernel {kernel} ({how}); the source is kept at {source}\n{output}"
    hint = "run the command yourself to see all of its output: {command}"


class TritonNotFound(UserError):
    template = "compiling for a GPU needs Triton, which is not installed here"
    hint = "run `python -m pip install 'torch-kgen[gpu]'`; a CUDA build of torch brings the Triton that fits it"


class NoProgress(InternalError):
    template = "a schedule comes to no end: the last attempt refused {refused}, as the one before"
    hint = "set options={{'templates': False}}, and report this"


class TritonBuildFailed(InternalError):
    template = "Triton failed on kernel {kernel} for sm_{arch} ({how}); the source is kept at {source}\n{output}"
    hint = "see the whole log: {log}"


class KernelTooLarge(InternalError):
    template = "kernel {kernel} needs {needed} bytes of shared memory; a program has {available} on {device}"
    hint = "report it, with the kernel's text (options={{'debug': 'folder'}} keeps it)"


class KernelSpills(InternalError):
    template = "kernel {kernel} keeps {stack} bytes of each thread's registers in memory, where at most {most} are worth while"
    hint = "choose smaller tiles, or correct what the template's `resources` says of registers"


class ConfigurationFailed(InternalError):
    template = "{choice} cannot run: {why}"
    hint = "leave the configuration out, or correct what the template's `resources` says of it"


class RuntimeBuildFailed(UserError):
    template = "building kgen's native runtime failed ({how})\n{output}"
    hint = "check that the compiler can build against torch's headers and that the Python headers are installed: {command}"


class LaunchFailed(InternalError):
    template = "{problem}"
    hint = "run with CUDA_LAUNCH_BLOCKING=1: an error may come from an earlier kernel"


class DriverNotFound(UserError):
    template = "the CUDA driver cannot be used: {cause}"
    hint = "check that `nvidia-smi` works in this environment"


class MixedCapabilities(UserError):
    template = "one graph runs on GPUs of different compute capabilities: {devices}"
    hint = "compile the parts for each GPU apart"


class UnsupportedDevice(UserError):
    template = "kgen cannot generate code for device {device!r} ({operator}, {line})"
    hint = "move the tensors to the CPU, or leave this part out of the compiled region"


class MixedDevices(UserError):
    template = "{operator} got tensors on {devices} ({line})"
    hint = "move its arguments to one device"


class MixedDtypes(UserError):
    template = "{operator} got {dtypes} where one dtype is needed ({line})"
    hint = "cast its arguments to one dtype"


class InputMismatch(UserError):
    template = "argument {position} of a compiled graph has {actual}, but the graph was compiled for {expected}"
    hint = "call through torch.compile, which compiles again when inputs change; have vmap and jvp in the compiled function"


class LoweringFailed(InternalError):
    template = "lowering {operator} failed: {cause} ({line})"
    hint = "set KGEN_DEBUG=<folder> to keep the graph, and report it; options={{'fallback': '{operator}'}} runs it in eager"


class MissingLowering(InternalError):
    template = "no rule lowers {operator} and it cannot run in eager: {cause} ({line})"
    hint = "leave the call out of the compiled region with torch.compiler.disable"


class DuplicateRule(InternalError):
    template = "two rules lower {operator}: {first} and {second}"


class InvalidIR(InternalError):
    template = "after stage {stage}: {node}: {problem}"


class MissingOp(InternalError):
    template = "the {backend} back end has no text for scalar op {op!r}"


class BadTemplate(UserError):
    """`where` is the file and the line of the mistake; without it, those of the author's call."""

    template = "template {template}{place}: {problem}"
    hint = "see docs/templates/reference.md for what a template declares"

    def __init__(self, where: str = "", **details: Any) -> None:
        found = where or _authors_line()
        super().__init__(**{"place": f" ({found})" if found else "", **details})


def _authors_line() -> str:
    """The innermost line of the stack that is neither kgen's nor one of a library that it calls through."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("kgen", "jinja2", "torch", "importlib"):
            return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class BadSlot(InternalError):
    template = "template {template} ({where}): {problem}"
    hint = "see docs/templates/reference.md for what a slot takes"


class DuplicateTemplate(UserError):
    template = "two templates are called {template}: {first} and {second}"
    hint = "give one of them another name: @kgen.template(name=...)"


class LoopsTaken(UserError):
    template = "template {template}: the kernels of loops({kind!r}) on device {device!r} have a template, {last}"
    hint = "name the template that this one replaces: loops({kind!r}, replaces={last!r}); it takes what this one refuses"


class NoLoopTemplate(UserError):
    template = "no template takes kernel {kernel}, which is loops({kind!r}): {why}"
    hint = "register one, or let the one that was replaced take it: a built-in template refuses nothing"


class UnknownTemplate(UserError):
    template = "no template is called {template}"
    hint = "{near}use one of: {valid}"


class UnknownModule(UserError):
    template = "there is no module {module}"
    hint = "name a module that Python finds from this folder, without .py"


class ModuleFailed(UserError):
    template = "module {module} cannot be imported: {cause}"
    hint = "python -c 'import {module}' shows where it fails"


class TemplateRefused(UserError):
    template = "template {template} does not take this problem: {reason}"
    hint = "leave the choice to the cost model"


class TemplateCheckFailed(UserError):
    template = "template {template} fails {case} with {config}: {problem}"
    hint = "{repeats} repeats it (with problems= where you gave them); kgen.config.override(debug=folder) keeps its code"


class FusionRequired(UserError):
    template = "{producer} and {consumer} must be fused (require_fused), but: {reason}"
    hint = "{change}"


class FusionForbidden(UserError):
    template = "{producer} and {consumer} must not be fused (forbid_fused), but they share kernel {kernel}"
    hint = "remove the forbid_fused context, or split the operations"


class BadCallName(UserError):
    template = "{name!r} names no operator"
    hint = "write 'aten.mm', or one call of it: 'aten.mm@layers.3.mlp', 'aten.mm@model.py:12' or 'aten.mm#2'"


class NothingNamed(UserError):
    template = "{where} names {name!r}, and no graph compiled inside has such a call"
    hint = "name {known}; kgen.explain shows the operators of each kernel, and where they were called"


class InvalidProgram(InternalError):
    template = "host program: {where}: {rule}"


class InvalidTensorMap(InternalError):
    template = "a TMA descriptor of {buffer} needs {rule}"


class TensorMapRefused(InternalError):
    template = "kernel {kernel} cannot have a TMA descriptor of {buffer}: {problem}"
    hint = "let the kernel's template refuse such operands, or read them through pointers"


class TuningFileNotAFile(UserError):
    template = "the tuning file {path} is {kind}"
    hint = "name a plain file for the option tuning_file or KGEN_TUNING_FILE; it need not exist"


class TuningFileNotReadable(UserError):
    template = "the tuning file {path} cannot be read: {problem}"
    hint = "give a file that `python -m kgen tune script.py` or `python -m kgen cache export OUT` wrote"


class TuningFileNotWritable(UserError):
    template = "the tuning file {path} cannot be written: {problem}"
    hint = "set KGEN_TUNING_FILE, or the option tuning_file, to a file in a folder you can write to"


class TuningFileExists(UserError):
    template = "{path} exists already"
    hint = "`python -m kgen cache merge {path} IN` adds entries to it"


class UnknownTuningDevice(UserError):
    template = "no measurement is of device {device!r}"
    hint = "use one of: {valid}"


class InvalidTuningEntry(InternalError):
    template = "an entry of a tuning file cannot have the {field} {value}"


class UnhashableKey(InternalError):
    template = "a cache key cannot hold {kind}: {value}"


class NotConvertible(UserError):
    template = "kgen.control_flow cannot convert {function}: {problem}\n  in {file}, line {line}"
    hint = "write the loop or branch over tensors of fixed sizes and types, without Python objects that change (docs/loops.md)"


class NoSource(UserError):
    template = "kgen.control_flow needs the source of {function}: {cause}"
    hint = "define it with `def` in a file"


class NotExportable(UserError):
    template = "kgen.export cannot write this module to a folder: {reason}"
    hint = "leave that part out of the module, or use kgen.compile, which compiles in the process that runs it"


class NoExport(UserError):
    template = "{folder} is no folder that kgen.export has written, or is damaged ({problem})"
    hint = "export the module again"


class ExportedElsewhere(UserError):
    template = "the program was exported for another machine or installation: {what} was {made}, and here is {here}"
    hint = "export it here, or for a CPU with less: kgen.export(..., options={{'isa': 'avx2'}})"


class WrongArguments(UserError):
    template = "the exported program does not take these arguments: {problem}, and not {expected}"
    hint = "call it as the module, with sizes that dynamic_shapes names where they differ from the example's"


class OperatorNotLoaded(UserError):
    template = "the exported program calls {operator}, and this process has no such operator"
    hint = "import the module that defines it before kgen.load"
