"""Models and tools of others: Hugging Face checkpoints in and out, this attention inside `transformers`, lm-eval."""
