"""BPFed: the method, and the operations that only it uses."""
