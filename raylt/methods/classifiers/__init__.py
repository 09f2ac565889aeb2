"""Methods that compute a classifier after training, with one pass over all clients."""
