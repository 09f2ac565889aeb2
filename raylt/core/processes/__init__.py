"""Clients in forked processes of this machine: the workers, and the fleet that uses them."""
