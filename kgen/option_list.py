"""`kgen.list_options`: every option with what it does, its default, its values and its environment variable."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kgen import config

__all__ = ["Option", "list_options"]

_TEXTS = {
    "mode": "default, with CUDA graphs, or with measured choices",
    "numerics": "where values are rounded, and whether orders of additions are fixed",
    "fallback": "operators that run in eager; `all` for every one",
    "fusion": "several loops share a kernel",
    "inlining": "elementwise operators are computed where they are read",
    "loop_reordering": "loops run in another order than the operator's dimensions",
    "templates": "matmuls, convolutions and attention may be kernels of kgen's",
    "template_packages": "templates of installed packages are imported, by the entry-point group `kgen.templates`",
    "prologues": "templates compute their operands where they load them",
    "operand_padding": "operands with unaligned rows are copied into padded ones",
    "horizontal_fusion": "kernels that need nothing of each other may share a launch",
    "loop_batching": "iterations of an unrolled loop become one batched operator",
    "loop_rolling": "an unrolled loop whose iterations need each other's results is a loop again, with one body",
    "layer_sharing": "equal layers of a model are compiled once, as calls of one body; by `auto` where steps take no longer",
    "measurements": "tuning files are read",
    "early_launch": "a GPU's kernel may be launched before the one in front of it has ended",
    "recompute_scores": "backward graphs compute a softmax again instead of reading it",
    "chunked_logits": "gradients of large logits are made in runs of columns: less memory for one more matmul",
    "layouts": "tensors around convolutions may be channels last",
    "top_k": "the largest elements of rows and the order of short ones: by kernels, by the library, or by what is faster",
    "freezing": "for inference: what depends on the module's tensors alone is computed once",
    "verify": "the IR is checked after each stage",
    "debug": "a folder for graphs, IR, verdicts and generated code",
    "cache": "the caches on disk are used",
    "cache_dir": "the folder of the caches",
    "compiler": "the C++ compiler",
    "isa": "the CPU's instruction set; by default the best one",
    "tuning": "whether a max-autotune mode measures before a graph runs, or the default mode while it runs",
    "tuning_seconds": "how long one graph may measure",
    "tuning_file": "the file that measurements are read from and added to",
    "gpu_interpreter": "for tests: GPU kernels run in Triton's interpreter, on the CPU's tensors",
    "poison": "for tests: memory is full of NaNs before a kernel writes it",
    "profile_kernels": "kernels are regions of a profiler's timeline, as graphs always are",
    "debug_info": "C++ kernels have lines for gdb and perf; their sources stay in the cache",
    "strict": "a kernel that cannot be built raises, where PyTorch's operators would take over",
    "compile_seconds": "how long a compiler may take for one source; 0 is no limit",
}


@dataclass(frozen=True, slots=True)
class Option:
    """`values` are the only valid ones, or none where the type alone decides. `variable` is empty where there is none."""

    name: str
    default: object
    type: str
    text: str
    values: tuple[str, ...] = ()
    variable: str = ""

    def __str__(self) -> str:
        given = f" {'|'.join(self.values)}" if self.values else ""
        variable = f" [{self.variable}]" if self.variable else ""
        return f"{self.name}={self.default!r}{given}: {self.text}{variable}"


def list_options() -> tuple[Option, ...]:
    """All options, in the order of `kgen.config.Config`; ``print(*kgen.list_options(), sep="\\n")`` shows them."""
    variables = {field: name for name, field in config.VARIABLES.items()}
    return tuple(
        Option(one.name, one.default, str(one.type), _TEXTS[one.name], config.choices(one.name), variables.get(one.name, ""))
        for one in dataclasses.fields(config.Config)
    )
