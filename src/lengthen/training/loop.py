"""The training loop: from a config and a corpus to checkpoints, on one process or many.

A step's data, learning rate and random numbers are functions of the step, so a run that was stopped at any moment and
resumed takes the very steps that it would have taken. Losses are read from the device every few steps, and always
before a checkpoint: what is saved was seen to be finite.
"""

from __future__ import annotations

import fcntl
import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lengthen import io
from lengthen.config import Config, differences
from lengthen.data import Corpus
from lengthen.model import Transformer
from lengthen.model.score import autocast
from lengthen.training import checkpoint as checkpoints
from lengthen.training.batches import Batches, Work
from lengthen.training.events import Outcome, Start, TensorBoard, Watcher
from lengthen.training.log import Log, Record
from lengthen.training.optimizer import adamw
from lengthen.training.parallel import World, last_pass, spread
from lengthen.training.schedule import share
from lengthen.training.validation import loss_at

RANK_SEED, STEP_SEED = 7_368_787, 104_729  # primes that keep the random numbers of processes and steps apart


def train(
    config: Config,
    corpus: Corpus,
    out: str | Path,
    here: World,
    resume: str = "auto",
    watchers: Iterable[Watcher] = (),
) -> Outcome:
    """Train, or go on training, and return how it ended.

    Args:
        config: the run; `config.model.vocab_size` must hold the corpus' tokens.
        corpus: token shards, with a train and a validation split.
        out: the run's folder: config.toml, metrics.jsonl, checkpoints/.
        here: this process among those of the run, from `parallel.world()`.
        resume: "auto" goes on from the last checkpoint in `out`, "never" refuses a folder that has one, a path goes on
            from that checkpoint.
        watchers: told of every step, on the first process.
    """
    with _alone_in(Path(out), here), _Stop() as stop:
        run = _Run(config, corpus, Path(out), here, resume, tuple(watchers) if here.first else (), stop)
        try:
            return run.go()
        finally:
            run.close()


class _Run:
    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        out: Path,
        here: World,
        resume: str,
        watchers: tuple[Watcher, ...],
        stop: _Stop,
    ) -> None:
        self.config, self.corpus, self.out, self.here, self.stop = config, corpus, out, here, stop
        self.folder = out / "checkpoints"
        self.resumed = _resumed(self.folder, resume)
        self.watchers = watchers
        self._refuse_what_does_not_fit()
        on_gpu = here.device.type == "cuda"
        narrow = config.train.precision == "bfloat16" or (config.train.precision == "auto" and on_gpu)
        self.precision = torch.bfloat16 if narrow else torch.float32
        self.batches = Batches(corpus, config, here)
        torch.manual_seed(config.train.seed)  # the same weights on every process
        self.core = Transformer(config.model).to(here.device)
        self.core.checkpoint_activations = config.train.checkpoint_activations
        if config.train.compile or (config.train.compile is None and on_gpu):
            self.core.compile_parts()
        self.model = spread(self.core, here, config.distributed.mode, self.precision)
        self.optimizer = adamw(self.core, config.optimizer)
        self.step = 0
        if self.resumed is not None:
            checkpoints.load(self.resumed, self.core, self.optimizer, here)
            self.step = self.resumed.step
        self.pending: list[tuple[int, _Numbers]] = []  # of steps that were launched and not yet read
        self.loss: float | None = None
        self.validation: tuple[int, float] | None = None  # the step, and the loss at the training length
        self.log: Log | None = None
        if here.first:
            checkpoints.sweep(self.folder)
            for path in checkpoints.set_aside(self.folder, self.step):
                self.tell("said", f"a checkpoint of a later step is now {path}")
            io.write_text(out / "config.toml", io.to_toml(config))
            self.log = Log(out / "metrics.jsonl", after=self.step if self.resumed else -1)
            if config.log.tensorboard:
                self.watchers = (*self.watchers, TensorBoard(out / "tensorboard"))

    def _refuse_what_does_not_fit(self) -> None:
        config, corpus, resumed = self.config, self.corpus, self.resumed
        if corpus.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size: expected at least the {corpus.vocab_size} tokens of {corpus.directory}, "
                f"got {config.model.vocab_size}"
            )
        if config.evaluation.every:
            for length in config.evaluation_lengths:
                if len(corpus["validation"]) < length + 1:
                    raise ValueError(
                        f"evaluation.lengths: {length} tokens and the one after them are more than the validation "
                        f"split of {corpus.directory} has ({len(corpus['validation'])})"
                    )
        if resumed is None:
            return
        saved = io.read_toml(resumed.path / "config.toml", Config)
        checkpoints.refuse_other_model(resumed.path, saved.model, config.model)
        if resumed.state["data"] != corpus.fingerprint:
            raise ValueError(
                f"--data: {corpus.directory} is not the corpus that {resumed.path} was trained on (its fingerprint is "
                f"{corpus.fingerprint}, expected {resumed.state['data']}); give that one, or train into another --out"
            )
        if resumed.step > config.train.steps:
            raise ValueError(
                f"train.steps: expected at least the {resumed.step} steps that {resumed.path} has taken, "
                f"got {config.train.steps}"
            )
        for change in differences(replace(saved, model=config.model), config):
            self.tell("said", f"changed since {resumed.path.name} was written: {change}")

    def go(self) -> Outcome:
        """Take all steps that are left."""
        config = self.config
        steps, every = config.train.steps, config.log.every
        self.tell("started", self._start())
        self.clock = time.perf_counter()
        self.model.train()
        if self.step == 0 and config.evaluation.every:
            self._evaluate()
        for step, work in self.batches(self.step, steps):
            self._take(step, work)
            self.step = step + 1
            done = self.step == steps
            saves = done or (config.checkpoint.every > 0 and self.step % config.checkpoint.every == 0)
            evaluates = config.evaluation.every > 0 and (done or self.step % config.evaluation.every == 0)
            stopped = False
            if saves or evaluates or self.here.device.type == "cpu":
                stopped = self._read(self.step)
            elif self.step % every == 0:  # what was launched a while ago: so the GPU never runs out of work
                stopped = self._read(self.step - every)
            if evaluates:
                self._evaluate()
            if saves or stopped:
                saved = self._save()
            if stopped and not done:
                return self._end(False, saved)
        if self.resumed is not None and self.resumed.step == steps:  # nothing was left to do
            return self._end(True, self.resumed.path)
        return self._end(True, saved)

    def _take(self, step: int, work: Work) -> None:
        """Take one step; leave its numbers on the device."""
        config, here = self.config, self.here
        seed = config.train.seed + STEP_SEED * (step + 1) + RANK_SEED * here.rank
        torch.manual_seed(seed % (1 << 63))  # for dropout
        rate = config.optimizer.lr * share(config.schedule, step, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scored = here.sum(work.scored)
        rows = min(config.train.micro_batch or work.ids.shape[0], work.ids.shape[0])
        passes = list(work.passes(rows))
        total = torch.zeros((), dtype=torch.float64, device=here.device)
        for number, (ids, targets, starts) in enumerate(passes):
            with last_pass(self.model, number == len(passes) - 1):
                with autocast(here.device, self.precision):
                    loss, _ = self.model(ids, targets, document_starts=starts)
                total += loss.detach()
                # Processes average their gradients, and what is wanted is the mean over all of their targets.
                (loss * (here.size / scored).to(loss.dtype)).backward()
        limit = config.train.clip or math.inf
        norm = nn.utils.clip_grad_norm_(self.core.parameters(), limit, foreach=here.device.type == "cuda")
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # (Made on the device: moving a number there would wait for all that was launched before.)
        wants_to_stop = torch.full_like(total, float(self.stop.asked))
        sums = here.sum(torch.stack((total, wants_to_stop)))
        self.pending.append((step, _Numbers(torch.stack((sums[0] / scored, norm.double(), sums[1])))))

    def _read(self, until: int) -> bool:
        """Read the numbers of the steps up to one; return whether some process was asked to stop."""
        ready = [(step, numbers.read()) for step, numbers in self.pending if step < until]
        if not ready:
            return False
        self.pending = self.pending[len(ready) :]
        now, config = time.perf_counter(), self.config
        tokens = config.train.batch * config.model.train_length
        speed = len(ready) * tokens / (now - self.clock)
        peak = self.here.peak_flops()
        needed = config.model.flops_per_token(config.model.train_length)
        stopped = False
        for step, (loss, norm, asked) in ready:
            record: Record = {
                "kind": "step",
                "step": step + 1,
                "loss": loss,
                "rate": config.optimizer.lr * share(config.schedule, step, config.train.steps),
                "norm": norm,
                "tokens": (step + 1) * tokens,
                "tokens_per_second": round(speed, 1),
                "utilisation": None if peak is None else round(speed * needed / (peak * self.here.size), 4),
            }
            self._write(record)
            self.tell("stepped", record)
            self.loss = loss
            stopped = stopped or asked > 0
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._refuse_to_go_on(step + 1, loss, norm)
        self.clock = now
        return stopped

    def _refuse_to_go_on(self, step: int, loss: float, norm: float) -> None:
        whole = checkpoints.listed(self.folder)
        last = f"the last checkpoint is {whole[-1].path}" if whole else "there is no checkpoint"
        raise FloatingPointError(
            f"step {step}: expected a finite loss and gradient, got loss {loss} and gradient norm {norm}; "
            f"{last}, and nothing after it was saved. A lower --optimizer.lr or a longer --schedule.warmup may help"
        )

    def _evaluate(self) -> None:
        config, tokens = self.config, self.corpus["validation"]
        rows = config.train.micro_batch or max(1, config.train.batch // self.here.size)
        for length in config.evaluation_lengths:
            if config.model.longest is not None and length > config.model.longest:
                continue  # such a model has nothing for positions beyond its table
            fits = max(1, rows * config.model.train_length // length)

            def tell(part: float, length: int = length) -> None:
                self.tell("evaluating", self.step, length, part)

            task, limit = self.batches.validation, config.evaluation.tokens
            loss, scored = loss_at(self.model, tokens, length, limit, fits, self.here, task, self.precision, tell)
            if length == config.model.train_length:
                self.validation = self.step, loss
            record: Record = {"kind": "evaluation", "step": self.step, "length": length, "loss": loss}
            record |= {"perplexity": _exp(loss), "tokens": scored, "protocol": "nonoverlapping"}
            self._write(record)
            self.tell("evaluated", record)
        self.clock = time.perf_counter()  # the time that evaluation took is not training's

    def _save(self) -> Path:
        measured = self.validation is not None and self.validation[0] == self.step
        state = {
            "step": self.step,
            "loss": self.loss,
            "validation": self.validation[1] if measured and self.validation else None,
            "data": self.corpus.fingerprint,
            "folder": str(self.corpus.directory.resolve()),
            "tokenizer": self.corpus.tokenizer_name,
            "processes": self.here.size,
        }
        saved = checkpoints.save(self.folder, state, self.config, self.core, self.optimizer, self.here)
        if self.here.first:
            checkpoints.prune(self.folder, self.config.checkpoint.keep)
        self.tell("saved", saved.path, self.step)
        self.clock = time.perf_counter()
        return saved.path

    def _start(self) -> Start:
        read = self.config.train.steps * self.config.train.batch * self.config.model.train_length
        on_gpu = self.here.device.type == "cuda"
        return Start(
            config=self.config,
            out=self.out,
            first=self.step,
            device=torch.cuda.get_device_name(self.here.device) if on_gpu else "cpu",
            processes=self.here.size,
            parameters=self.config.model.parameters,
            train_tokens=len(self.corpus["train"]),
            epochs=read / len(self.corpus["train"]),
        )

    def _end(self, finished: bool, path: Path) -> Outcome:
        outcome = Outcome(self.step, finished, path, self.loss)
        self.tell("ended", outcome)
        return outcome

    def _write(self, record: Record) -> None:
        if self.log is not None:
            self.log.write(record)

    def tell(self, what: str, *about: Any) -> None:
        """Tell the watchers."""
        for watcher in self.watchers:
            getattr(watcher, what)(*about)

    def close(self) -> None:
        """Put the log on the disk."""
        if self.log is not None:
            self.log.close()
        for watcher in self.watchers:
            watcher.close()


class _Numbers:
    """Numbers on their way from the device: asking for them waits for the step that made them, and for no later one."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        return cast(list[float], self._values.tolist())


def _resumed(folder: Path, resume: str) -> checkpoints.Checkpoint | None:
    """Return the checkpoint to go on from."""
    whole = checkpoints.listed(folder)
    if resume == "auto":
        return whole[-1] if whole else None
    if resume == "never":
        if whole:
            raise FileExistsError(
                f"--resume never: {folder} holds a run already (its last checkpoint is {whole[-1].path.name}); "
                "choose another --out, or go on with --resume auto"
            )
        return None
    return checkpoints.open_checkpoint(resume)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def _alone_in(out: Path, here: World) -> Iterator[None]:
    """Make the run's folder, and hold it against other runs while this one lasts."""
    if not here.first:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{out}: another process is training into this folder") from None
        yield


class _Stop:
    """Notes a first SIGTERM or Ctrl-C, so that the loop saves and stops after a step; a second stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: whoever runs us has the signals
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
