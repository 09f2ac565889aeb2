"""FedSM: the method and the operations that only FedSM uses."""
