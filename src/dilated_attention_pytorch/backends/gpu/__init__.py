"""The host side that the Triton and Hopper backends share: launch tables, launches, buffers."""
