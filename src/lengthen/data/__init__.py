"""Text → tokens → memory-mapped shards → windows for training.

>>> from lengthen.data import Corpus, Windows, prepare
>>> corpus = prepare(["books.txt.xz"], "data/books", tokenizer="bpe", vocab_size=16384, separator="\\0")
>>> windows = Windows(corpus["train"], length=1024, batch=32)
>>> windows.batch(step=0).ids.shape  # the same for the same step, always
torch.Size([32, 1024])

`prepare` makes a corpus on disk, `Corpus` opens one, `Windows` cuts it into batches. `docs/data.md` has the format.
"""

from lengthen.data.corpus import Corpus, Tokens
from lengthen.data.preparation import prepare
from lengthen.data.sources import standard_library
from lengthen.data.tokenizer import Tokenizer
from lengthen.data.windows import Batch, Windows

__all__ = ["Batch", "Corpus", "Tokenizer", "Tokens", "Windows", "prepare", "standard_library"]
