"""A second back end for the front end of the software device: Metal kernels to NVPTX.

Not a part of the library: for estimates of registers and code size (ir.py, by
tools/kernel_resources.py) and for runs on a real GPU (tools/real_gpu.py).
"""
