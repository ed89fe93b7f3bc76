"""Hugging Face models: load and export them, use this attention inside `transformers`; lm-evaluation-harness."""
