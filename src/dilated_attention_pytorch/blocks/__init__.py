"""Block-sparse attention: patterns of blocks (``pattern``, ``rules``, ``flex``), lists of them (``lists``), execution."""
