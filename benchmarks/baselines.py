"""Other implementations of dilated attention, for comparison: the method of the paper's authors, and FlexAttention."""

from __future__ import annotations

from dilated_attention_pytorch.workbench.peers import authors, flex

METHODS = {"authors": authors, "flex": flex}
