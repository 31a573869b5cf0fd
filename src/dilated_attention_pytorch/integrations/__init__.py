"""Other people's frameworks. Each package here imports its framework; nothing else in the library imports these."""
