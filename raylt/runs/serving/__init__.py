"""An exported model over HTTP: requests, answers and the page, without a server."""
