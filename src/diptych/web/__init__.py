"""The search service: an HTTP API over an index and its model, and the page that uses it."""
