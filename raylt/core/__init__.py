"""The base of every method: clients, the server, the fleet between them, and the experiment."""
