"""What attention and its gradients compute, as templates of all languages declare it."""

from __future__ import annotations

from kgen.templates.contract import contraction
from kgen.templates.pattern import elementwise, program, softmax

__all__ = ["ATTENTION", "GRADIENT", "GRADIENT_OF_SCORES", "GRADIENT_OF_TABLE", "GRADIENT_OF_VALUES", "MULTIPLIED_ATTENTION"]

ATTENTION = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=softmax("scores", over="n", logsumexp=True),
    out=contraction("weights", "b,n,v -> b,m,v"),
)
# With weights that something multiplies before they weigh values: dropout's zeros, or a gate.
MULTIPLIED_ATTENTION = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=softmax("scores", over="n", logsumexp=True),
    multiplied=elementwise("weights"),
    out=contraction("multiplied", "b,n,v -> b,m,v"),
)
# That of queries and, with rows and columns exchanged, that of keys.
GRADIENT = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    dweights=contraction("b,m,v", "b,n,v -> b,m,n"),
    dscores=elementwise("scores", "dweights"),
    out=contraction("dscores", "b,n,e -> b,m,e"),
)
GRADIENT_OF_VALUES = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=elementwise("scores"),
    out=contraction("weights", "b,n,v -> b,m,v"),
)
# That of what is added to scores, or multiplies them, and is the same for several batches, `r`. That of what is the same for
# rows or columns as well is a `GRADIENT` with one column e, which is 1.
GRADIENT_OF_SCORES = program(
    scores=contraction("b,r,m,d", "b,r,n,d -> b,r,m,n"),
    dweights=contraction("b,r,m,v", "b,r,n,v -> b,r,m,n"),
    dscores=elementwise("scores", "dweights"),
    out=contraction("dscores", "b,r -> b,m,n"),
)
# That of a table of which each score has an entry, such as a bias for buckets of distances.
GRADIENT_OF_TABLE = program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    dweights=contraction("b,m,v", "b,n,v -> b,m,n"),
    dscores=elementwise("scores", "dweights"),
    out=contraction("dscores", "b,m,n,c -> b,c"),
)
