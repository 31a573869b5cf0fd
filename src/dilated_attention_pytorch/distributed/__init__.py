"""Sequences sharded over ranks: who holds what (shards), and what every rank sends, receives and computes (schedule)."""
