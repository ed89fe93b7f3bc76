"""The memory that `lengthen prepare` takes for long documents of many kinds, each in a process of its own.

    python benchmarks/prepare_memory.py FOLDER [NAME …]

It writes the texts into FOLDER (some 0.6 GB), prepares each, and prints the largest size that the process had. Without
names it takes all; English comes from FOLDER/english.txt, if that is there.
"""

from __future__ import annotations

import argparse
import gzip
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from lengthen.data import prepare, standard_library

SIZE = 60_000_000


def words(path: Path, first: int, last: int, *, space: str = " ", longest: int = 8) -> None:
    """Write lines of 60 words, some far more frequent than others, of letters in a range."""
    draw, letters = random.Random(0), [chr(number) for number in range(first, last)]
    known = ["".join(draw.choices(letters, k=draw.randint(2, longest))) for _ in range(50_000)]
    weights = [1 / (rank + 2) for rank in range(len(known))]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < SIZE:
            drawn = draw.choices(known, weights, k=60_000)
            file.writelines(space.join(drawn[at : at + 60]) + "\n" for at in range(0, len(drawn), 60))


def code(path: Path) -> None:
    """Write the standard library with every line indented, again and again."""
    lines = [line for file in standard_library() for line in file.read_text(encoding="utf-8").splitlines() if line]
    text = "".join(f"    {line}\n" for line in lines).encode()
    path.write_bytes((text * (SIZE // len(text) + 1))[:SIZE].decode(errors="ignore").encode())


def bomb(path: Path, byte: bytes) -> None:
    """Write a file that unpacks to 1 GB."""
    with gzip.open(path, "wb") as file:
        file.write(b"x")
        for _ in range(1000):
            file.write(byte * 1_000_000)


TEXTS: dict[str, Callable[[Path], object]] = {
    "english.txt": lambda path: path.stat(),
    "georgian.txt": lambda path: words(path, 0x10D0, 0x10F1),
    "khmer.txt": lambda path: words(path, 0x1780, 0x17C6, space=""),
    "kana.txt": lambda path: words(path, 0x3041, 0x3097, space="", longest=4),
    "code.txt": code,
    "line.txt": lambda path: path.write_bytes(b"a" * 200_000_000),
    "letters.txt.gz": lambda path: bomb(path, b"a"),
    "spaces.txt.gz": lambda path: bomb(path, b" "),
}


def measure(source: Path, tokenizer: str) -> None:
    """Prepare one source in this process, and print the largest size that it had."""
    prepare(source, source.with_name(f"{source.name}.{tokenizer}"), tokenizer=tokenizer, validation=0, force=True)
    print(f"{source.name:<16}{tokenizer:<8}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def main() -> None:
    """Start a process for each source and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the texts and what is prepared from them go")
    parser.add_argument("names", nargs="*", help=f"which texts, of {', '.join(TEXTS)} (default: all)")
    parser.add_argument("--one", metavar="TOKENIZER", help="prepare the one text named, in this process")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in TEXTS]:
        parser.error(f"names: expected some of {', '.join(TEXTS)}, not {', '.join(unknown)}")
    if options.one:
        measure(options.folder / options.names[0], options.one)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or TEXTS:
        if name == "english.txt" and not (options.folder / name).exists():
            continue
        TEXTS[name](options.folder / name)
        for tokenizer in ("bytes", "bpe") if name in ("line.txt", "letters.txt.gz", "spaces.txt.gz") else ("bpe",):
            subprocess.run([sys.executable, __file__, str(options.folder), name, "--one", tokenizer], check=True)


if __name__ == "__main__":
    main()
