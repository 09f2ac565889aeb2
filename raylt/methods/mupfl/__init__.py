"""MuPFL: the method, and the operations that it alone needs."""
