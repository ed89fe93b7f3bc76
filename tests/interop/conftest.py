"""Small models of transformers with random weights, large enough that attention is not flat."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

WORDS = 64
T5 = ("t5", "mt5", "umt5")
SPECIAL = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def exact_falcon_alibi(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Falcon's bias as transformers means it: theirs multiplies in bfloat16, whatever the model's dtype is."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor(attention_mask, num_heads, torch.float32).to(dtype)


def config_of(kind: str, heads: int, **options: Any) -> Any:
    import transformers

    width = 4 * heads
    if kind == "bloom":
        return transformers.BloomConfig(
            vocab_size=WORDS, hidden_size=width, n_layer=2, n_head=heads, **SPECIAL, **options
        )
    if kind == "mpt":
        sizes = {"d_model": width, "n_heads": heads, "n_layers": 2, "max_seq_len": 64}
        return transformers.MptConfig(vocab_size=WORDS, **sizes, **SPECIAL, **options)
    if kind == "falcon":
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 2}
        options = {"alibi": True, "multi_query": False, "parallel_attn": False, **options}
        return transformers.FalconConfig(vocab_size=WORDS, **sizes, **SPECIAL, **options)
    if kind in T5:
        sizes = {"d_model": width, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": heads, "dropout_rate": 0.0}
        special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
        options = {"relative_attention_max_distance": 20, **options}
        if kind == "umt5":  # in transformers 5.17 its decoder, without a mask, is causal only so
            options = {"attn_implementation": "eager", **options}
        return transformers.AutoConfig.for_model(kind, vocab_size=WORDS, **sizes, **special, **options)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": heads}
    if kind != "gpt_neox":
        sizes |= {"num_key_value_heads": heads // 4, "head_dim": 4}
    options = {"max_position_embeddings": 256, **options}
    return transformers.AutoConfig.for_model(kind, vocab_size=WORDS, **sizes, **SPECIAL, **options)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what builds a model in evaluation mode: `make("bloom", heads=12)`."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.falcon import modeling_falcon

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact_falcon_alibi)

    def build(kind: str, heads: int = 8, std: float = 0.3, **options: Any) -> Any:
        torch.manual_seed(len(kind) + heads)
        auto = transformers.AutoModelForSeq2SeqLM if kind in T5 else transformers.AutoModelForCausalLM
        model = auto.from_config(config_of(kind, heads, **options)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=std)
        return model

    return build


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every test."""
    torch.manual_seed(0)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, WORDS, (3, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def left(ids: torch.Tensor) -> torch.Tensor:
    """A mask for `ids`, padded on the left: none, some, most."""
    return (torch.arange(ids.shape[1]) >= torch.tensor([[0], [7], [33]])).long()


@pytest.fixture
def right(left: torch.Tensor) -> torch.Tensor:
    return left.flip(1)


@pytest.fixture
def op_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by a name with each call of the op: outputs that agree could be transformers' own."""
    from lengthen.interop.accelerate import alibi, registered

    calls: list[str] = []
    for module in (alibi, registered):
        op = module.attention

        def counted(*arguments: Any, op: Any = op, module: ModuleType = module, **named: Any) -> torch.Tensor:
            calls.append(module.__name__.rpartition(".")[2])
            return op(*arguments, **named)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "attention", counted)
    return calls
