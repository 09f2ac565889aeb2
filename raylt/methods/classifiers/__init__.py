"""Methods that compute a classifier after training, in one pass over all clients."""
