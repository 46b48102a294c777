"""An attention of your own in plain PyTorch, which is one kernel: capped scores, a slope for each head, a sliding window.

python -m examples.attention_variant     # on a GPU, else on the CPU
"""

import torch

import kgen


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Of q, k and v of (batch, heads, length, elements), with scores as Gemma 2 caps them and ALiBi's distances."""
    rows, columns = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    scores = 30 * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / 30)
    scores = scores + slopes[:, None, None] * (columns - rows)
    seen = (columns <= rows) & (rows - columns < 128)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 8, 512, 64, device=device) for _ in range(3))
    slopes = 2.0 ** -torch.arange(1.0, 9.0, device=device)
    report = kgen.explain(attention, q, k, v, slopes)  # prints the kernel and why it is one
    print(f"kernels: {len(report.kernels)}")
    found = torch.compile(attention, backend="kgen")(q, k, v, slopes)
    torch.testing.assert_close(found, attention(q, k, v, slopes), rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
