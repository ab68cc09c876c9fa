"""Compiler-scheduled kernels: plain Triton, any CUDA GPU that Triton serves, and its interpreter on the CPU."""
