"""Plans: which tiles and which block lists a pattern gives for sequences of given lengths."""
