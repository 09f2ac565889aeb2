"""SFD: the method and the operations that only SFD uses."""
