"""The old name of `bench.cpu_matmuls`, for one release."""

import warnings

from bench.cpu_matmuls import main

if __name__ == "__main__":
    warnings.warn("bench.cpu_products is now bench.cpu_matmuls", FutureWarning, stacklevel=1)
    main()
