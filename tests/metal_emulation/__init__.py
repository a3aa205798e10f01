"""Runs the GPU kernels' texts on the host: C++17, fibers, and a watch over every memory access.

``emulation`` compiles and runs; ``runtime.cpp`` holds the fibers and the watch, ``metal_shim.hpp``
and ``cuda_shim.hpp`` the parts of the two languages that the kernels use.
"""
