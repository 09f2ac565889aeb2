"""The base of all methods: clients, the server, the fleet that connects them, and the experiment."""
