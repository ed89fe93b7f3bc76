"""The training loop: from a config and a corpus to checkpoints, on one process or many.

A step's data, learning rate and random numbers are functions of the step, so a run that was stopped at any moment and
resumed is the same as one never stopped: same batches, lr and dropout; bit-identical on CPU. Losses are read from the
device every few steps, and always before a checkpoint, so a saved checkpoint had finite losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lengthen import io
from lengthen.checks import describe
from lengthen.config import Config
from lengthen.data import Corpus
from lengthen.model import IGNORED, Transformer
from lengthen.model.loss import perplexity
from lengthen.model.score import autocast, device_name, precision_named
from lengthen.training import checkpoint as checkpoints
from lengthen.training import initial
from lengthen.training.batches import Batches, Work, scoring
from lengthen.training.events import Outcome, Start, TensorBoard, Watcher
from lengthen.training.log import Log, Record
from lengthen.training.memory import refuse_what_cannot_fit
from lengthen.training.optimizer import adamw, set_lr
from lengthen.training.parallel import World, last_pass, spread, world
from lengthen.training.resuming import chosen, refuse_other_run
from lengthen.training.schedule import lr_fraction
from lengthen.training.stopping import Stop, alone_in
from lengthen.training.validation import loss_at

RANK_SEED, STEP_SEED = 7_368_787, 104_729  # primes that keep the random numbers of processes and steps apart


def train(
    config: Config,
    corpus: Corpus,
    out: str | Path,
    here: World | None = None,
    resume: str = "auto",
    watchers: Iterable[Watcher] = (),
    *,
    init: str | Path | None = None,
    force: bool = False,
) -> Outcome:
    """Train, or resume training, and return how it ended.

    Args:
        config: the run; `config.model.vocab_size` holds the corpus' tokens, or is None and becomes their number.
        corpus: token shards, with a train and a validation split.
        out: the run's folder: config.toml, metrics.jsonl, checkpoints/.
        here: this process among those of the run, from `parallel.world()`; None: the processes that torchrun started,
            or this one alone.
        resume: "auto" resumes from the last whole checkpoint in `out`, "never" refuses a folder that has one, "step-15"
            resumes from that checkpoint in `out`, a path from that checkpoint into an `out` that has none.
        watchers: told of every step, on the first process.
        init: a run, a checkpoint or a model's file, whose weights the run begins with at step 0 (see initial.py).
        force: start even if the estimate says that memory is too small.
    """
    for name, value, kind in (("config", config, Config), ("corpus", corpus, Corpus)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}, got {describe(value)}")
    with ExitStack() as stack:
        if here is None:
            here = stack.enter_context(world())
        config = resolved(config, corpus)
        stack.enter_context(alone_in(Path(out), here))
        stop, told = Stop(), tuple(watchers) if here.first else ()
        begun = None if init is None else initial.located(Path(init))
        run = _Run(config, corpus, Path(out), here, resume, told, stop, begun, force)
        stack.enter_context(stop)  # only now: before its steps a run has nothing to save, and stops at once
        try:
            return run.go()
        finally:
            run.close()


def resolved(config: Config, corpus: Corpus) -> Config:
    """Return the config with what the corpus says: the size of the vocabulary, if none is given, and the tokenizer."""
    kind: Any = corpus.index.tokenizer.kind
    size = corpus.vocab_size if config.model.vocab_size is None else config.model.vocab_size
    data = replace(config.data, tokenizer=kind, vocab_size=corpus.vocab_size if kind == "bpe" else None)
    return replace(config, model=replace(config.model, vocab_size=size), data=data)


class _Run:
    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        out: Path,
        here: World,
        resume: str,
        watchers: tuple[Watcher, ...],
        stop: Stop,
        init: Path | None,
        force: bool,
    ) -> None:
        self.config, self.corpus, self.out, self.here, self.stop = config, corpus, out, here, stop
        self.folder, self.watchers = out / "checkpoints", watchers
        self.late = here.device.type != "cpu"  # losses are read some steps late, so that a GPU's queue never runs empty
        self._refuse_what_does_not_fit()
        self.resumed, passed = chosen(self.folder, resume, here)
        for problem in passed:
            self.tell("said", f"passed over, as it is not whole: {problem}")
        self.init = self._begun_with(init, resume)
        if self.resumed is not None:
            for change in refuse_other_run(self.resumed, config, corpus):
                self.tell("said", change)
        self._build(init, force)
        self.step = 0
        if self.resumed is not None:
            checkpoints.load(self.resumed, self.core, self.optimizer)
            self.step = self.resumed.step
        self.pending: list[tuple[int, _Numbers]] = []  # of steps that were launched and not yet read
        self.loss: float | None = None
        self.validation: tuple[int, float] | None = None  # the step, and the loss at the training length
        self.known: dict[Path, checkpoints.Checkpoint | None] = {}  # of the folder's checkpoints, which are whole
        self.log: Log | None = None
        here.all_or_none(self._prepare_folder)

    def _refuse_what_does_not_fit(self) -> None:
        config, corpus = self.config, self.corpus
        if corpus.vocab_size > config.model.vocabulary:
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

    def _begun_with(self, init: Path | None, resume: str) -> checkpoints.Init | None:
        """Return the model that the run began with: the one to begin with now, or what the checkpoint says."""
        if init is None:
            return None if self.resumed is None else self.resumed.state.init
        if resume not in ("auto", "never"):
            raise ValueError(f"--init: expected none beside --resume {resume}, got {init}: a run has one beginning")
        found = initial.identified(init)
        if self.resumed is not None:
            initial.refuse_another(found, self.resumed)
        return found

    def _build(self, init: Path | None, force: bool) -> None:
        """Make the batches, the model and the optimizer."""
        config, here = self.config, self.here
        on_gpu = here.device.type == "cuda"
        self.precision = precision_named(config.train.precision, here.device)
        self.batches = Batches(self.corpus, config, here)
        if not force:
            refuse_what_cannot_fit(config, here)
        torch.manual_seed(config.train.seed)  # the same weights on every process
        self.core = Transformer(config.model).to(here.device)
        if init is not None and self.resumed is None:
            for line in initial.begin(self.core, init):
                self.tell("said", line)
        self.core.checkpoint_activations = config.train.checkpoint_activations
        if config.train.compile or (config.train.compile is None and on_gpu):
            self.core.compile_parts()
        self.model = spread(self.core, here, config.distributed.mode, self.precision)
        self.optimizer = adamw(self.core, config.optimizer)

    def _prepare_folder(self) -> None:
        """Prepare the run's folder for resuming, and open its log."""
        if not self.here.first:
            return
        checkpoints.sweep(self.folder)
        for path in checkpoints.set_aside(self.folder, self.step):
            self.tell("said", f"a checkpoint of a later step is now {path}")
        io.write_text(self.out / "config.toml", io.to_toml(self.config))
        own = self.resumed is not None and self.resumed.path.resolve().parent == self.folder.resolve()
        self.log = Log(self.out / "metrics.jsonl", after=self.step if own else -1)
        if self.config.log.tensorboard:
            self.watchers = (*self.watchers, TensorBoard(self.out / "tensorboard", self.step))

    def go(self) -> Outcome:
        """Run the remaining steps."""
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
            if saves or evaluates or not self.late:
                stopped = self._read(self.step)
            elif self.step % every == 0:  # launched some steps ago
                stopped = self._read(self.step - every)
                if stopped:  # what is saved now was taken since
                    self._read(self.step)
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
        """Run one step; leave its metrics on the device."""
        config, here = self.config, self.here
        seed = config.train.seed + STEP_SEED * (step + 1) + RANK_SEED * here.rank
        torch.manual_seed(seed % (1 << 63))  # for dropout
        set_lr(self.optimizer, config.optimizer.lr * lr_fraction(config.schedule, step, config.train.steps))
        scored = here.sum(work.scored).clamp(min=1)  # an encoder's batch may have nothing hidden
        rows = min(config.train.micro_batch or work.ids.shape[0], work.ids.shape[0])
        passes = list(work.passes(rows))
        total = torch.zeros((), dtype=torch.float64, device=here.device)
        for number, (ids, targets, starts) in enumerate(passes):
            with last_pass(self.model, number == len(passes) - 1):
                with autocast(here.device, self.precision):
                    mean = self.model(ids, targets, document_starts=starts)
                here_scored = (targets != IGNORED).sum()
                total += mean.detach() * here_scored
                # Processes average their gradients, and what is wanted is the mean over all of their targets.
                (mean * (here_scored * here.size / scored).to(mean.dtype)).backward()
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
                "lr": config.optimizer.lr * lr_fraction(config.schedule, step, config.train.steps),
                "grad_norm": norm,
                "tokens": (step + 1) * tokens,
                "tokens_per_second": round(speed, 1),
                "mfu": None if peak is None else round(speed * needed / (peak * self.here.size), 4),
            }
            self._write(record)
            self.tell("stepped", record)
            self.loss = loss
            stopped = stopped or asked > 0
            if not (math.isfinite(loss) and math.isfinite(norm)):
                expected = "expected a finite loss and gradient"
                self._refuse_to_go_on(f"step {step + 1}: {expected}, got loss {loss} and gradient norm {norm}")
        self.clock = now
        return stopped

    def _refuse_to_go_on(self, problem: str) -> None:
        there = checkpoints.folders(self.folder)
        last = f"the last checkpoint is {there[-1][1]}" if there else "there is no checkpoint"
        raise FloatingPointError(
            f"{problem}; {last}, and nothing after it was saved. "
            "A lower --optimizer.lr or a longer --schedule.warmup may help"
        )

    def _evaluate(self) -> None:
        config, tokens = self.config, self.corpus["validation"]
        rows = config.train.micro_batch or max(1, config.train.batch // self.here.size)
        task = scoring(config, self.corpus)
        for length in config.evaluation_lengths:
            if config.model.longest is not None and length > config.model.longest:
                continue  # such a model has nothing for positions beyond its table
            fits = max(1, rows * config.model.train_length // length)

            def tell(part: float, length: int = length) -> None:
                self.tell("evaluating", self.step, length, part)

            count = max(1, min(config.evaluation.tokens, len(tokens) - 1) // length)
            loss, scored = loss_at(self.core, task, length, count, fits, self.here, self.precision, tell)
            if length == config.model.train_length:
                self.validation = self.step, loss
            record: Record = {"kind": "evaluation", "step": self.step, "length": length, "loss": loss}
            record |= {"perplexity": perplexity(loss), "tokens": scored, "protocol": "nonoverlapping"}
            self._write(record)
            self.tell("evaluated", record)
        self.clock = time.perf_counter()  # the time that evaluation took is not training's

    def _save(self) -> Path:
        self._refuse_weights_that_are_not_finite()
        measured = self.validation is not None and self.validation[0] == self.step
        state = checkpoints.State(
            step=self.step,
            data=self.corpus.fingerprint,
            folder=str(self.corpus.directory.resolve()),
            tokenizer=self.corpus.tokenizer_name,
            loss=self.loss,
            validation=self.validation[1] if measured and self.validation else None,
            processes=self.here.size,
            init=self.init,
        )
        saved = checkpoints.save(self.folder, state, self.config, self.core, self.optimizer, self.here)
        if self.here.first:
            checkpoints.prune(self.folder, self.config.checkpoint.keep, saved, self.known)
        self.tell("saved", saved.path, self.step)
        self.clock = time.perf_counter()
        return saved.path

    def _refuse_weights_that_are_not_finite(self) -> None:
        """Refuse to save what the last update made of the weights, if a loss of theirs could not be finite."""
        weights = self.core.state_dict().values()
        parts = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
        bad = torch.stack([~torch.isfinite(part).all() for part in parts]).any()
        if self.here.sum(bad.double()).item():
            self._refuse_to_go_on(f"step {self.step}: expected finite weights, got some that are not after its update")

    def _start(self) -> Start:
        read = self.config.train.steps * self.config.train.batch * self.config.model.train_length
        return Start(
            config=self.config,
            out=self.out,
            first=self.step,
            device=device_name(self.here.device),
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
