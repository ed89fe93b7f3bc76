"""Long-context tasks with exact answers, made from a text and its tokenizer at any length (RULER's kinds, 2404.06654).

    passkey          a number that stands once in the text, asked for at its end
    needles          the number of one of four keys
    variables        the names that hold a value, set one to another
    common_words     the three words that a list has most often
    frequent_words   the three most frequent words of a list, in order
    recall           the value of a key, one character each: learned by a small model in a minute

    text = Haystack.of(corpus)
    samples = TASKS["passkey"].samples(text, length=4096, depths=[0, 0.5, 1], count=30, seed=0)
    right = answered(model, samples)                       any model with logits
    found = evaluate(open_run("runs/tiny"), corpus, ["passkey"], [256, 1024])

One file per task. sample.py has what they share, runner.py scores, results.py keeps, training.py writes documents of a
task for a model to learn it from.
"""

from lengthen.evaluation.tasks.registry import TASKS
from lengthen.evaluation.tasks.results import TaskResult
from lengthen.evaluation.tasks.runner import answered, evaluate
from lengthen.evaluation.tasks.sample import Draws, Haystack, Sample, Task, TooShortError

__all__ = ["TASKS", "Draws", "Haystack", "Sample", "Task", "TaskResult", "TooShortError", "answered", "evaluate"]
