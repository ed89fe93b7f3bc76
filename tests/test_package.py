"""`import lengthen` gives its names on first use, whatever was imported before, and needs no torch until then."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import lengthen

CALL = "q = torch.randn(1, 1, 4, 8); assert attention(q, q, q).shape == q.shape"


@pytest.mark.parametrize(
    "code",
    [
        f"import torch, lengthen; attention = lengthen.attention; {CALL}",
        f"import torch; from lengthen import attention; {CALL}",
        f"import torch, lengthen.attention.biases; attention = lengthen.attention; {CALL}",
        f"import torch, lengthen as l; l.Linear; import lengthen.attention.op; attention = l.attention; {CALL}",
        f"import torch; from lengthen.model import Transformer; from lengthen import attention; {CALL}",
        f"import torch; from lengthen import *; {CALL}; positions.build('rope', heads=1, head_dim=8, width=8)",
        "import lengthen; lengthen.positions.names()",
        "import lengthen.positions.alibi; import lengthen; lengthen.positions.names()",
        "from lengthen import positions; positions.names()",
        "from lengthen import Transformer, ModelConfig; import lengthen.model; assert lengthen.model.load",
        "from lengthen.attention import attention, reach; import lengthen; assert lengthen.reach is reach",
    ],
)
def test_whatever_was_imported_before(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "code", ["import lengthen; dir(lengthen)", "from lengthen import io, config, checks", "import lengthen.cli.main"]
)
def test_without_torch(code: str) -> None:
    ending = "; import sys; assert not {'torch', 'numpy', 'tyro'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + ending], check=True, capture_output=True)


def test_every_name_is_there_with_torch_alone() -> None:
    others = ("numpy", "safetensors", "tokenizers", "transformers", "tyro", "rich")
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); from lengthen import *; load, accelerate"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)


def test_names() -> None:
    assert set(lengthen.__all__) <= set(dir(lengthen))
    for name in lengthen.__all__:
        assert getattr(lengthen, name) is getattr(lengthen, name)
    assert callable(lengthen.attention)
    with pytest.raises(AttributeError, match="module 'lengthen' has no attribute 'Linar'"):
        lengthen.Linar  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Linar'"):
        from lengthen import Linar  # type: ignore[attr-defined]  # noqa: F401


def test_a_config_is_pickled() -> None:
    config = lengthen.ModelConfig(vocab_size=9, layers=1, width=8, heads=2, train_length=4)
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(lengthen.attention)) is lengthen.attention
