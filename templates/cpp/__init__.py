"""C++ for CPUs: the vector layer that generated kernels include, its library, and the table of scalar operations."""

from pathlib import Path

INCLUDE = Path(__file__).parent / "include"
UMBRELLA_HEADER = "kgen/kernel.h"
VECMATH_SOURCE = Path(__file__).parent / "lib" / "vecmath.cpp"
