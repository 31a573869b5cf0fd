"""Warp-specialised kernels for Hopper GPUs, written in Gluon."""
