"""Records of runs, and the files that store them."""
