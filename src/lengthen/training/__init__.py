"""Training: one command from text to a checkpoint, on a laptop or on many GPUs.

../config.py   the settings of a run
loop.py        the loop
batches.py     what each step reads; masking.py is an encoder's task
validation.py  the loss at the training length and beyond, while training
schedule.py    the learning rate; optimizer.py is AdamW
parallel.py    one process or many
checkpoint.py  saving, whole or not at all; resuming.py: which one to go on from; initial.py: --init
memory.py      refuses what cannot fit; stopping.py: signals, and the lock on the run's folder
log.py         JSON lines; events.py has the callbacks
"""

from lengthen.config import Config, load, presets
from lengthen.training.events import Outcome, Watcher
from lengthen.training.loop import train
from lengthen.training.parallel import World, world

__all__ = ["Config", "Outcome", "Watcher", "World", "load", "presets", "train", "world"]
