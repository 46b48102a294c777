"""Lowering: aten graphs to loop IR. `lower` and `reinplace` are the two stages."""

from kgen.lowering.graph import LoweringContext, lower
from kgen.lowering.operation import OperatorAxes
from kgen.lowering.reinplace import SUBJECTS as REINPLACED
from kgen.lowering.reinplace import reinplace

__all__ = ["REINPLACED", "LoweringContext", "OperatorAxes", "lower", "reinplace"]
