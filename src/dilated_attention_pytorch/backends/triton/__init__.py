"""The backend of portable Triton kernels."""
