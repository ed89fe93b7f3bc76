"""The command line: one module per verb, over flags.py, each a thin wrapper of the layer that does the work."""
