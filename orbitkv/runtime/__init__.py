"""What runs a graph: channels, lanes, one task a node, and the manager that owns them."""
