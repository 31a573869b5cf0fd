"""The backend of warp-specialised kernels for Hopper GPUs."""
