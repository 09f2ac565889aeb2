"""BPFed: the method and the operations that only BPFed uses."""
