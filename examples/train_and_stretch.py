"""Train a small model at 64 tokens with each of some methods, and read it at up to 16 times that length.

    python examples/train_and_stretch.py --methods alibi rotary xpos --steps 300

Everything `lengthen train` and `lengthen eval` do, from Python. The text is the source of Python's standard library, or
yours: --text book.txt. A few minutes for four methods on two cores; nothing is left behind.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from lengthen.data import prepare, standard_library
from lengthen.evaluation import evaluate, open_run, protocol, verdicts
from lengthen.training import load, train

TIMES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["sinusoidal", "rotary", "xpos", "alibi"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders of text")
    parser.add_argument("--tokens", type=int, default=32768, help="how many are scored at each length")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        corpus = prepare(options.text or standard_library(), folder / "corpus")
        for method in options.methods:
            config = load("tiny", {"model.positions": method, "train.steps": options.steps, "evaluation.every": 0})
            train(config, corpus, folder / method)
            subject, length = open_run(folder / method), config.model.train_length
            protocols = [
                protocol(name, length * times, length) for name in ("nonoverlapping", "blockwise") for times in TIMES
            ]
            for name, verdict in verdicts(evaluate(subject, corpus, protocols, tokens=options.tokens)).items():
                print(f"{method:<12} {name:<15} {verdict}", flush=True)


if __name__ == "__main__":
    main()
