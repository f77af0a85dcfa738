"""Running, evaluating, ablating and showing: what the verbs of the command line do."""
