"""Kernels that Apple's compiler made, run on the software device beside ours.

The wheel mlx-metal has a Metal library (AIR, which is LLVM bitcode) and the headers of
its kernels. metallib.py takes functions out of the library, air.py makes them callable,
kernels.py compiles the same headers with our front end and puts both in one library.
tests/oracle/test_apple_compiler.py compares their results.
"""
