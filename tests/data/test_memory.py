"""The memory that `prepare` takes does not grow with the length of a document, in any script, nor with their number."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

# One process imports the package and forks a child for each source; a child says by how many MB it grew.
DRIVER = r"""
import json, os, resource, sys
from lengthen.data import prepare, vocabulary
sys.modules["lengthen.data.vocabulary"].BYTES = 200_000

def size():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

grown = {}
for name, options in json.loads(sys.argv[2]).items():
    read, write = os.pipe()
    if os.fork() == 0:
        begun = size()
        prepare(os.path.join(sys.argv[1], name), os.path.join(sys.argv[1], "out " + name), workers=2, **options)
        os.write(write, str(size() - begun).encode())
        os._exit(0)
    os.close(write)
    grown[name] = int(os.read(read, 100) or -1)
    os.wait()
print(json.dumps(grown))
"""

SCRIPTS = {"georgian": (0x10D0, 0x10F1, " "), "khmer": (0x1780, 0x17A3, ""), "kana": (0x3041, 0x3097, "")}


def test_memory_has_a_bound(tmp_path: Path) -> None:
    """Uncut, 1.2 MB of these take 200 MB and more."""
    draw = random.Random(0)
    for name, (first, last, space) in SCRIPTS.items():
        letters = [chr(number) for number in range(first, last)]
        words = ["".join(draw.choices(letters, k=4)) for _ in range(4000)]
        lines = (space.join(draw.choices(words, k=12)) for _ in range(1_200_000 // 150))
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "code").write_text("".join(f"    {name} = {name} + 1\n" for name in map(str, range(50_000))))
    (tmp_path / "line").write_bytes(b"a" * 12_000_000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"x" + b" " * 16_000_000, 1))
    (tmp_path / "documents").write_bytes(b"a\0" * 200_000 + b"b")
    bpe = {"tokenizer": "bpe", "vocab_size": 300, "validation": 0}
    options = dict.fromkeys((*SCRIPTS, "code"), bpe) | {name: {"validation": 0} for name in ("line", "bomb.gz")}
    options["documents"] = {"separator": "\0", "validation": 0.5}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(tmp_path), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    grown = json.loads(done.stdout)
    assert all(0 <= grew < 100 for grew in grown.values()), grown
