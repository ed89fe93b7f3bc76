"""Other people's models: Hugging Face checkpoints in and out, and this attention inside `transformers`."""
