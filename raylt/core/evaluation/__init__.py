"""Evaluation of the global model and of each client's own."""
