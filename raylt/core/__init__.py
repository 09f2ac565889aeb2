"""What every method is built on: clients, the server, the fleet between them, and the experiment."""
