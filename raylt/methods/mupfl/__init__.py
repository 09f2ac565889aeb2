"""MuPFL: the method and the operations that only MuPFL uses."""
