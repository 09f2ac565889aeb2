"""Local training: the SGD loop, optimisers, loss terms, classifiers on features, CUDA graphs."""
