"""Classifiers made after training, of one pass over all clients."""
