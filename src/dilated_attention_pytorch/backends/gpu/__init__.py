"""The host side of the GPU kernels, which the Triton and the Hopper backend share: tables, launches, buffers."""
