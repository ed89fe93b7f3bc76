"""Text → tokens → memory-mapped shards → windows for training.

>>> from lengthen.data import Corpus, Windows, prepare
>>> corpus = prepare(["books.txt.xz"], "data/books", tokenizer="bpe", vocab_size=16384, separator="\\0")
>>> windows = Windows(corpus["train"], length=1024, batch=32)
>>> windows.batch(step=0).ids.shape  # the same for the same step, always
torch.Size([32, 1024])

`prepare` makes a corpus on disk, `Corpus` opens one, `Windows` cuts it into batches. `docs/data.md` has the format.

    preparation.py   `prepare`, in passes; settings.py has its options
    sources.py       files, folders and datasets; readers.py reads documents out of them, cuts.py says where to cut
    documents.py     which split each document belongs to
    tokenizer.py     bytes, BPE, any tokenizer.json; vocabulary.py bounds the memory that training a BPE takes
    parts.py         tokenised parts, and shards made of them
    corpus.py        a corpus on disk; checksums.py tells whether its files are whole
    windows.py       batches; masking.py hides tokens for an encoder
    text.py          tokens into text as they come
"""

from lengthen.data.corpus import Corpus, Tokens
from lengthen.data.preparation import prepare
from lengthen.data.sources import standard_library
from lengthen.data.tokenizer import Tokenizer
from lengthen.data.windows import Batch, Windows

__all__ = ["Batch", "Corpus", "Tokenizer", "Tokens", "Windows", "prepare", "standard_library"]
