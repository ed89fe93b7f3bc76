"""Models and tools of others."""
