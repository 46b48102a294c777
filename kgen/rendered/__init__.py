"""What templates render, as plain data: C++ functions, GPU kernels and their calls. Nothing here compiles or runs."""
