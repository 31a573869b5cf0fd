"""Orders: bijections of the positions of a sequence."""
