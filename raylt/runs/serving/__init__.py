"""Serving an exported model over HTTP: requests, responses and the web page.

The server itself is in `actors`.
"""
