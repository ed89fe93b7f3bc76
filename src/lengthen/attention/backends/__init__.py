"""The ways to solve a problem; each is a module with `unfit(problem)` and `run(problem)`.

reference   the definition
native      torch's own attention, where it is exact
chunked/    plain torch in O(length) memory, on any device
triton/     kernels for NVIDIA GPUs
"""
