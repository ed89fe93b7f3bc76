"""The tasks by name."""

from __future__ import annotations

from lengthen.evaluation.tasks import common_words, frequent_words, needles, passkey, recall, variables
from lengthen.evaluation.tasks.sample import Task

MODULES = (passkey, needles, variables, common_words, frequent_words, recall)
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in MODULES}
