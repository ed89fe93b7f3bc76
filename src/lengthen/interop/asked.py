"""Read a config.json key by key: an unknown key is refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lengthen import io
from lengthen.checks import describe, nearest

REQUIRED: Any = object()  # the default of a key that has none
NOTHING: tuple[Any, ...] = (None, False, [], {}, "")  # values that ask for nothing, whatever the key

# Keys that change nothing when a trained model is used: names, training, generation, how outputs are returned.
_LISTED = """
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping eos_token_id
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range
    is_causal is_decoder keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type
    name_or_path no_repeat_ngram_size num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id use_cache attention_dropout attn_pdrop hidden_dropout resid_pdrop
    embd_pdrop emb_pdrop resid_dropout embedding_dropout _name_or_path _attn_implementation_autoset
"""
IGNORED = frozenset(_LISTED.split())


class Asked:
    """A table of a config.json, read key by key; `finish` refuses what is left."""

    def __init__(self, table: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.table, self.where, self.prefix = dict(table), where, prefix
        self.read: set[str] = set()

    def take(self, *names: str, default: Any = REQUIRED, hint: Any = Any) -> Any:
        """Return the value of a key that goes by these names, of the type that the hint says."""
        given = [name for name in names if self.table.get(name) is not None]
        self.read |= set(names)
        if not given:
            if default is REQUIRED:
                raise ValueError(f"{self.where}: {self.prefix}{names[0]}: expected a value, got none")
            return default
        first = self.table[given[0]]
        for other in given[1:]:
            self.same(other, first, given[0])
        return io.checked(self.where, self.prefix + given[0], first, hint)

    def same(self, name: str, value: Any, first: str) -> None:
        """Refuse a key that says another value than the first key of that meaning."""
        self.read.add(name)
        if self.table.get(name) not in (None, value):
            raise self.refusal(name, f"{value!r} as {first} says", self.table[name])

    def word(self, *names: str, words: Mapping[Any, Any], default: Any = REQUIRED) -> Any:
        """Return what the value of a key stands for; one that stands for nothing here is refused."""
        value = self.take(*names, default=default)
        if not isinstance(value, str | bool | int) or value not in words:
            raise self.refusal(names[0], " or ".join(map(repr, words)), value, words)
        return words[value]

    def part(self, *names: str) -> Asked:
        """Return the table that a key holds."""
        found = self.take(*names, default={})
        if not isinstance(found, Mapping):
            raise self.refusal(names[0], "a table", found)
        return Asked(found, self.where, f"{self.prefix}{names[0]}.")

    def refusal(self, name: str, expected: str, got: Any, words: Iterable[Any] = ()) -> ValueError:
        """Return the error of a value that asks for what is not done here."""
        hint = nearest(got, [str(word) for word in words]) if isinstance(got, str) else ""
        return ValueError(f"{self.where}: {self.prefix}{name}: expected {expected}, got {describe(got)}{hint}")

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse keys that nobody has read, unless they ask for nothing or are known to change nothing."""
        for name, value in self.table.items():
            if name in self.read or name in IGNORED or name in ignored or value in NOTHING:
                continue
            raise ValueError(
                f"{self.where}: {self.prefix}{name}: expected a key whose meaning is known here, or one that asks for "
                f"nothing, got {describe(value)[:200]}"
            )
