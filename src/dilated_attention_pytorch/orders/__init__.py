"""Orders: permutations of the positions of a sequence."""
