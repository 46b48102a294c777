"""The list of op families: a new family is one file and one entry here."""

from __future__ import annotations

from kgen.lowering import (
    activation,
    attention,
    concat,
    contraction,
    convolution,
    creation,
    distance,
    donated,
    embedding_bag,
    foreach,
    indexing,
    logic,
    mutation,
    norm,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    row_order,
    scan,
    scatter,
    sorting,
    special,
    symbolic,
    top_k,
    user_kernel,
    views,
    windows,
)
from kgen.lowering.table import merge

FAMILIES = (
    activation, attention, concat, contraction, convolution, creation, distance, donated, embedding_bag, foreach, indexing,
    logic, mutation, norm, pointwise, pooling, random, reduction, resampling, row_order, scan, scatter, sorting, special,
    symbolic, top_k, user_kernel, views, windows,
)  # fmt: skip
RULES = merge(FAMILIES)
# Rules of operators that multiply and add up, and of those that only look at a tensor otherwise.
CONTRACTIONS, VIEWS = merge((contraction, convolution)), merge((views,))
