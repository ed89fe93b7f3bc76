"""Evaluation: perplexity at any length under a named protocol, analyses of attention, long-context tasks.

protocols.py    which windows are read, which tokens count, what each sees
measure.py      a text scored with any model; the scoring loop itself is model/score.py
runs.py         a checkpoint at many lengths; results.py keeps them, with how each was made
errors.py       standard errors of differences; verdict.py: how far a model can be stretched
memory.py       GPU memory that scoring took
tasks/          questions with exact answers: pass keys, needles, variables, words, recall: one file each
analyses/       resolution, loss by position, reach, attention by distance, induction, LongPPL: one file each
capture.py      the inputs of each layer's attention, by a forward hook
"""

from lengthen.evaluation.measure import Tally, score
from lengthen.evaluation.protocols import Protocol, protocol
from lengthen.evaluation.results import Result
from lengthen.evaluation.runs import Subject, evaluate, open_run
from lengthen.evaluation.verdict import Verdict, judge, verdicts
from lengthen.model.score import Reading

__all__ = [
    "Protocol",
    "Reading",
    "Result",
    "Subject",
    "Tally",
    "Verdict",
    "evaluate",
    "judge",
    "open_run",
    "protocol",
    "score",
    "verdicts",
]
