"""The model card of an exported model: what it is, how to load it, and its perplexity by length."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lengthen import __version__
from lengthen.evaluation import Protocol, Result, Subject, verdicts
from lengthen.evaluation.verdict import changes
from lengthen.interop.architecture import Architecture
from lengthen.interop.own import Own


def card(subject: Subject, architecture: Architecture, measured: list[Result], name: str) -> str:
    """Return README.md."""
    config, own = subject.model.config, isinstance(architecture, Own)
    library = "lengthen" if own else "transformers"
    first = "import lengthen.interop.huggingface  # the package lengthen; registers the architecture\n" if own else ""
    lines = [
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- lengthen\n- {config.positions}\n---",
        f"# {name}",
        f"A language model with {config.parameters:,} parameters and the position method `{config.positions}`, trained "
        f"at {config.train_length:,} tokens, as a `{architecture.name}`.",
        f"```python\n{first}from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        'ids = tokenizer("The", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))\n```",
        "## Perplexity by length",
        *(_measured(measured) if measured else ["Not measured: `lengthen eval` measures it."]),
        f"Written by lengthen {__version__}.",
    ]
    return "\n\n".join(lines) + "\n"


def _measured(found: list[Result]) -> list[str]:
    """Return tables, one for the same tokens in the same precision, and the verdicts."""
    parts, tables = [], defaultdict[tuple[Any, ...], list[Result]](list)
    for one in found:
        tables[one.data, one.split, one.document_mask, one.targets, one.precision].append(one)
    for _, several in sorted(tables.items()):
        here = sorted(several, key=lambda one: (one.protocol, one.length))
        change = changes(here)
        rows = [
            "| tokens at once | × trained | protocol | perplexity | change | bits/byte |",
            "|---|---|---|---|---|---|",
        ]
        for one in here:
            how = Protocol(one.protocol, one.length, one.stride, one.block, one.per_document)
            rows.append(
                f"| {one.length:,} | {one.length / one.train_length:g} | {how} | {one.perplexity:.3f} | "
                f"{change.get(one.key, '')} | {one.bits_per_byte:.4f} |"
            )
        text = f"Text {here[0].data}, split `{here[0].split}`: the same {here[0].tokens:,} tokens at every length"
        parts += [f"{text}, read in {here[0].precision}.", "\n".join(rows)]
        parts += [f"{name}: {verdict}." for name, verdict in verdicts(here).items()]
    return parts
