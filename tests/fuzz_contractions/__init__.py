"""An oracle for contractions: problems drawn from a seed, every candidate kernel of each, compared with float64.

A problem is data (`problem.Problem`): what is contracted (`kinds`), what is computed of operands before and of the result
behind (`around`), types, layouts and sizes. `draw` makes one of a seed. Three users share it:

    python -m tests.fuzz_contractions --minutes 9 --shard 1/4 --out out/fuzz-gpu    (make fuzz-gpu) every candidate on a GPU
    tests/fuzzing/test_fuzz_contractions.py                       small problems through Triton's interpreter
    tests/fuzz_contractions/operands.py                   which elements each operand tile reads, for all programs, no GPU
"""
