"""Patterns: which positions meet. A pattern knows no sequence and no device."""
