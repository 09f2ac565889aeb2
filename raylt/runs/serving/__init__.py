"""An exported model behind HTTP: requests, answers and the page, without a server."""
