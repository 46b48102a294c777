"""All transforms, in the order in which they are applied and asked."""

from __future__ import annotations

from kgen.scheduler.protocol import Transform
from kgen.scheduler.transforms.bare_results import BareResults
from kgen.scheduler.transforms.block_reduction import BlockReduction
from kgen.scheduler.transforms.column_reduction import ColumnReduction
from kgen.scheduler.transforms.concat_split import ConcatSplit
from kgen.scheduler.transforms.full_row_tiles import FullRowTiles
from kgen.scheduler.transforms.library_fusion import LibraryFusion
from kgen.scheduler.transforms.library_strides import LibraryStrides
from kgen.scheduler.transforms.operand_padding import OperandMaterialisation, OperandPadding
from kgen.scheduler.transforms.operand_reduction import OperandReduction
from kgen.scheduler.transforms.output_split import OutputSplit
from kgen.scheduler.transforms.recognition import ComputedOperands, Recognition, Untaken
from kgen.scheduler.transforms.recompute_trial import Recompute
from kgen.scheduler.transforms.row_totals import RowTotals
from kgen.scheduler.transforms.scale_hoisting import ScaleHoisting
from kgen.scheduler.transforms.scatter_copies import ScatterCopies
from kgen.scheduler.transforms.scatter_epilogue import ScatterEpilogue
from kgen.scheduler.transforms.shared_calls import SharedCalls
from kgen.scheduler.transforms.split_k import SplitK
from kgen.scheduler.transforms.split_reduction import SplitReduction
from kgen.scheduler.transforms.split_scan import SplitScan
from kgen.scheduler.transforms.split_softmax import SplitSoftmax
from kgen.scheduler.transforms.stored_gathers import StoredGathers
from kgen.scheduler.transforms.template_kernels import Offer, Prologues, Selection
from kgen.scheduler.transforms.tile_partials import TilePartials
from kgen.scheduler.transforms.tuning_queries import GroupedMatmuls, Measurements

TRANSFORMS: tuple[Transform, ...] = (
    StoredGathers(),
    Recognition(),
    Offer(),
    ConcatSplit(),
    ScatterCopies(),
    RowTotals(),
    Prologues(),
    SharedCalls(),
    ScaleHoisting(),
    GroupedMatmuls(),
    Measurements(),
    OperandMaterialisation(),
    SplitK(),
    OperandPadding(),
    ScatterEpilogue(),
    OperandReduction(),
    OutputSplit(),
    Recompute(),
    FullRowTiles(),
    Selection(),
    SplitSoftmax(),
    TilePartials(),
    BareResults(),
    LibraryStrides(),
    LibraryFusion(),
    ColumnReduction(),
    BlockReduction(),
    SplitReduction(),
    SplitScan(),
    ComputedOperands(),
    Untaken(),
)
