"""The command line: one module a verb, each a thin face of the layer that does the work."""
