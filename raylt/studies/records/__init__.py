"""Records of runs, and the files that keep them."""
