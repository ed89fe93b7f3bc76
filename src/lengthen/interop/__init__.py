"""Hugging Face models: load and export them, use this attention inside `transformers`; lm-evaluation-harness.

architecture.py   an architecture, described once for both ways; one file per family (llama.py, bloom.py, own.py …);
                  architectures.py lists them
asked.py          config.json key by key, unknown keys refused; rope.py: rotary angles
folder.py         files of weights, tensor by tensor
models.py         `lengthen.load`; subjects.py: what a verb works with, from any path
export.py         a model as a folder; card.py and byte_tokenizer.py write parts of it
huggingface.py    our own architecture as classes of `transformers`
accelerate/       this attention inside a loaded `transformers` model
lm_eval.py        models in lm-evaluation-harness
"""
