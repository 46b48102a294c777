"""The old name of `bench.gpu_matmuls`, for one release."""

import warnings

from bench.gpu_matmuls import main

if __name__ == "__main__":
    warnings.warn("bench.gpu_products is now bench.gpu_matmuls", FutureWarning, stacklevel=1)
    main()
