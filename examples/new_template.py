"""A template for an operator of your own: the L1 distances between the rows of two matrices.

python -m examples.new_template     # on a GPU, else in Triton's interpreter
"""

import torch

import kgen
from kgen import knob, operand, result


@torch.library.custom_op("example::l1_distance", mutates_args=())
def l1_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """distance[m, n] = sum over k of |x[m, k] - y[n, k]|: what runs where no template does."""
    return torch.cdist(x, y, p=1)


@l1_distance.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], y.shape[0])


@kgen.template(
    implements=kgen.operator("example::l1_distance", "m,k", "n,k -> m,n"), device="cuda", source="l1_distance.py.jinja"
)
class L1Distance(kgen.KernelTemplate):
    X, Y, D = operand("m", "k"), operand("n", "k"), result("m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K, WARPS = knob(32, 16), knob(32, 64), knob(16), knob(4)


def similarity(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A prologue (the scaled x) and an epilogue (the exponential) around the operator."""
    return torch.exp(-0.1 * l1_distance(x * scale, y))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, scale = (torch.randn(*shape, device=device) for shape in ((100, 70), (50, 70), (70,)))
    with kgen.config.override(gpu_interpreter=device == "cpu"):
        kgen.explain(similarity, x, y, scale)  # prints one kernel
        found = torch.compile(similarity, backend="kgen")(x, y, scale)
    torch.testing.assert_close(found, similarity(x, y, scale), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
