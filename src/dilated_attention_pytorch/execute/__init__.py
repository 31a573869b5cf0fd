"""Execution through stock kernels: one loop over strided and listed calls."""
