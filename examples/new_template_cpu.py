"""The template of `examples/new_template.py` for CPUs, in C++: loops of its own over elements.

python -m examples.new_template_cpu
"""

import torch

import kgen
from examples.new_template import similarity
from kgen import operand, result


@kgen.template(
    implements=kgen.operator("example::l1_distance", "m,k", "n,k -> m,n"), device="cpu", source="l1_distance.cpp.jinja"
)
class L1DistanceOnCpu(kgen.KernelTemplate):
    X, Y, D = operand("m", "k"), operand("n", "k"), result("m", "n")


def main() -> None:
    x, y, scale = torch.randn(100, 70), torch.randn(50, 70), torch.randn(70)
    kgen.explain(similarity, x, y, scale)  # prints one kernel
    found = torch.compile(similarity, backend="kgen")(x, y, scale)
    torch.testing.assert_close(found, similarity(x, y, scale), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
