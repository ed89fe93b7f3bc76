"""The command line: one module per verb, over flags.py, each a thin face of the layer that does the work."""
