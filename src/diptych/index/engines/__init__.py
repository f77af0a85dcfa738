"""One folder for each engine behind the protocol."""
