"""Tools that answer questions about calls, machines and patterns before somebody depends on them."""
