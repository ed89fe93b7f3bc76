"""The papers' tables are in the package, whole, with the numbers that the papers are known by."""

from __future__ import annotations

from lengthen.report import papers


def test_the_tables_are_whole() -> None:
    assert (len(papers.perplexity()), len(papers.resolution()), len(papers.speed_memory())) == (576, 9, 12)
    for row in papers.perplexity():
        assert row["paper"] in papers.SOURCES
        assert row["perplexity"] is None or row["perplexity"] > 1
        assert (row["train_length"], row["eval_length"]) > (0, 0)
    assert sum(row["perplexity"] is None for row in papers.perplexity()) == 10  # T5 ran out of memory


def test_known_numbers() -> None:
    def alibi(table: str, method: str, trained: int, length: int) -> list[float]:
        keys = {"paper": "ALiBi", "table": table, "method": method, "train_length": trained, "eval_length": length}
        return [r["perplexity"] for r in papers.perplexity() if all(r[key] == keys[key] for key in keys)]

    assert alibi("T2", "sinusoidal", 512, 512) == [20.05]
    assert alibi("T5", "alibi", 512, 3072) == [18.40]
    xpos = [row for row in papers.resolution() if row["method"] == "xpos" and row["blockwise"]]
    assert [row["resolution"] for row in xpos] == [1.08]
    first = papers.speed_memory()[0]
    assert (first["train_words_per_second"], first["memory_gb"]) == (28500, 15.3)


def test_curves_start_at_their_training_length() -> None:
    for name in papers.SETS:
        found = papers.ratios(name)
        assert found
        for label in {one["label"] for one in found}:
            times = [one["times"] for one in found if one["label"] == label]
            assert len(times) >= 2
        assert all(one["ratio"] == 1 for one in found if one["times"] == 1 and one["protocol"] != "blockwise")
    blockwise = [one for name in papers.SETS for one in papers.ratios(name) if one["protocol"] == "blockwise"]
    assert {(one["method"], round(one["perplexity"] / one["ratio"], 2)) for one in blockwise} == {
        ("alibi", 24.99),
        ("rotary", 25.52),
        ("xpos", 23.31),
    }
