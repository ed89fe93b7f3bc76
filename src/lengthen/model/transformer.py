"""The transformer: a stack of blocks, independent of the position method.

    x = embed(ids)                                  [batch, length, width], with positions added by methods that do so
    x = block(x)                                    for each block (block.py)
    logits = norm(x) · outputᵀ

Position enters through one object, the method at the positions of a pass (`at`): it adds itself to the embeddings,
splits and rotates each block's projection, and holds the op's bias and decay. A decoder and an encoder differ in the
mask and in what is predicted, not in their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lengthen.attention import Bidirectional, Causal, Mask, Window
from lengthen.attention.cache import Cache
from lengthen.attention.checks import can_look
from lengthen.attention.static import StaticCache
from lengthen.checks import describe
from lengthen.config import ModelConfig
from lengthen.model import generation
from lengthen.model.block import Block, norm
from lengthen.model.generation import Prompts
from lengthen.model.loss import IGNORED, linear_cross_entropy
from lengthen.model.sampling import Sampling
from lengthen.model.stepping import CHUNK
from lengthen.positions.method import Placed

INIT_SIZE = 0.5  # of what a matrix makes of features of size 1: its entries have a deviation of INIT_SIZE / √width


class Transformer(nn.Module):
    """A language model: a decoder that predicts the next token, or an encoder that predicts masked ones.

    >>> import torch
    >>> from lengthen import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig(vocab_size=258, layers=2, width=64, heads=4, train_length=32))
    >>> ids = torch.randint(258, (1, 100))
    >>> model(ids).shape
    torch.Size([1, 100, 258])
    >>> model(ids[:, :-1], targets=ids[:, 1:]).backward()  # the mean loss; the logits are never all in memory
    """

    output: nn.Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"config: expected a ModelConfig, got {describe(config)}")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.embedding_norm = norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Identity() if config.block == "post" else norm(config)  # the last block's is the last then
        self.output = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        with torch.random.fork_rng(devices=[]):  # models that differ in the method alone start alike, whatever it draws
            self.method = config.position_method()
        self.checkpoint_activations = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew, from torch's random generator.

        Matrices that write into the residual stream start smaller, by √(2·layers): the stream begins as the token's
        embedding. An output with the same weights would then predict the token just read, with a logit of √width / 2.
        So the last norm's scales start at 1 and −1 in turn, and an embedding has as much in even features as in odd
        ones: its product with what it was read as is 0.
        """
        std = INIT_SIZE / math.sqrt(self.config.width)
        for name, parameter in self.named_parameters():
            if name.startswith("method."):
                continue
            if parameter.dim() == 2:
                into_stream = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                parameter.normal_(std=std / math.sqrt(2 * self.config.layers) if into_stream else std)
            else:  # the scales of norms, and biases
                parameter.fill_(0 if name.endswith("bias") else 1)
        last = self.blocks[-1].feed_forward_norm if self.config.block == "post" else self.norm
        cast(Tensor, cast(nn.Module, last).weight)[1::2] = -1
        even, odd = self.embedding.weight[:, 0::2], self.embedding.weight[:, 1::2]
        odd *= even.norm(dim=1, keepdim=True) / odd.norm(dim=1, keepdim=True)
        for module in self.method.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    @property
    def output_weight(self) -> Tensor:
        """The output layer, `[vocabulary, width]`: the embedding's own where they are tied."""
        return self.embedding.weight if self.output is None else self.output.weight

    @property
    def usual_mask(self) -> Mask:
        """What each token sees, unless a mask is given."""
        if self.config.kind == "encoder":
            return Bidirectional()
        return Causal() if self.config.window is None else Window(self.config.window)

    def hidden(self, ids: Tensor, mask: Mask | None = None, document_starts: Tensor | None = None) -> Tensor:
        """Return the last block's output, normalised, `[batch, length, width]`; arguments as for `forward`."""
        length = ids.shape[1]
        mask = self.usual_mask if mask is None else mask
        positions = torch.arange(length, device=ids.device)
        if document_starts is not None:
            mask = mask.packed(document_starts)
        if mask.moved:  # documents and padded sequences count from their own start, as they would alone
            positions = (positions - mask.start(length, ids.device)).clamp(min=0)
        if mask.formula() is None:
            mask = mask.listed(length, length, 0, ids.device)  # once, not in every layer
        x, placed = self._enter(ids, positions, mask.two_sided)
        for block in self.blocks:
            if self.checkpoint_activations and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, placed, mask, use_reentrant=False)
            else:
                x = block(x, placed, mask)
        return self._finish(x)

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: Cache | StaticCache) -> Tensor:
        """Return the last block's output, normalised, for new tokens `[batch, new]` after those of a cache.

        The cache takes their keys and values, and says what they see: `model.cache(…)` makes one. Without gradients.
        """
        self._check(ids, None)
        slots = cache.begin(ids.shape[1], ids.device)
        x, placed = self._enter(ids, slots.positions, False, slots.before)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, placed, slots.mask, layer, slots.forget)
        return self._finish(x)

    def cache(self, policy: str = "full", mask: Mask | None = None, **options: Any) -> Cache:
        """Return an empty cache of this model's layers; arguments as for `lengthen.attention.cache.Cache`."""
        if self.config.kind != "decoder":
            raise ValueError("model: expected a decoder, whose tokens see those before them alone, got an encoder")
        magnitude = math.prod(float(getattr(part, "magnitude", 1.0)) for part in self.method.modules())
        found = [cast(Block, block).attention.highest_score(magnitude) for block in self.blocks]
        highest = [one for one in found if one is not None]
        return Cache(
            self.config.layers, policy, self.usual_mask if mask is None else mask, highest=highest or None, **options
        )

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: Iterable[int] = (),
        until: Callable[[int, list[int]], bool] | None = None,
        seed: int | Sequence[int] = 0,
        samples: int = 1,
        prefix: generation.Prefix | None = None,
        chunk: int = CHUNK,
        cache: str = "full",
        mode: str = "exact",
        mask: Mask | None = None,
        tolerance: float | None = None,
    ) -> Iterator[generation.Step]:
        """Return an iterator of steps, each with the next token of every sequence that has not ended.

        Args:
            prompts: tokens `[batch, length]`, or a list of sequences of any lengths, none of them empty.
            max_new_tokens: how many at most; 0 gives no step.
            temperature: 0 is greedy: the likeliest token.
            top_k: draw among the k likeliest.
            top_p: draw among the fewest that have this probability together.
            min_p: draw among those that have at least this fraction of the likeliest one's probability.
            repetition_penalty: what logits of tokens that were there are divided by (multiplied, below 0).
            stop: tokens that end a sequence; they are not part of it.
            until: called with a sequence's number and its new tokens; ends it by returning True.
            seed: of the random numbers, one for all prompts or one for each; every sample draws others.
            samples: continuations of each prompt, which is read once; those of prompt p begin at p·samples.
            prefix: what `model.prefix(…)` read, which all prompts continue, with copies of its cache.
            chunk: tokens of prompts that are read at once.
            cache: "full", "window" or "reach" (`lengthen.attention.cache`).
            mode: of "reach": "exact" or "certified".
            mask: what tokens see; None: `Causal()`, or the model's own window.
            tolerance: as for `attention`.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        told = {"policy": cache, "mode": mode, "mask": mask, "tolerance": tolerance}
        return generation.stream(
            *(self, prompts, max_new_tokens),
            sampling=sampling,
            samples=samples,
            seed=seed,
            stop=stop,
            until=until,
            prefix=prefix,
            chunk=chunk,
            cache=told,
        )

    def generate(self, prompts: Prompts, max_new_tokens: int, **options: Any) -> generation.Generated:
        """Return the new tokens of each sequence, why it ended, and the cache's bound; arguments as for `stream`."""
        prompts = prompts if isinstance(prompts, Tensor) else list(prompts)
        return generation.gather(
            len(prompts) * options.get("samples", 1), self.stream(prompts, max_new_tokens, **options)
        )

    def prefix(self, ids: Tensor | Sequence[int], chunk: int = CHUNK, **options: Any) -> generation.Prefix:
        """Return tokens read once, for `stream` and `generate` to continue; options as for `cache`."""
        return generation.read_prefix(self, ids, chunk, **options)

    def _enter(
        self, ids: Tensor, positions: Tensor, two_sided: bool, cached: int | None = None
    ) -> tuple[Tensor, Placed]:
        """Return the embeddings of tokens at these positions, and the position method at them."""
        x = self.embedding(ids)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.width)
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):  # else every block would read and write the stream in 32 bits
            dtype = torch.get_autocast_dtype(kind)
        placed = self.method.at(positions, dtype, two_sided, cached)
        x = placed.embed(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x).to(dtype), placed

    def _finish(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(x).to(x.dtype))

    def compile_parts(self) -> None:
        """Have torch.compile make kernels for the blocks, one graph for all of them, and for what follows them."""
        for block in self.blocks:
            block.compile(dynamic=False)
        self._finish = torch.compile(self._finish, dynamic=False)  # type: ignore[method-assign]

    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        mask: Mask | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or with targets the mean loss.

        Args:
            ids: tokens `[batch, length]`, integers below the vocabulary's size.
            targets: what each place should predict, `[batch, length]`; −100 is not scored.
            mask: what each token sees; None: `Causal()` for a decoder, or `Window` if the model has one, and
                `Bidirectional()` for an encoder. Evaluation beyond the training length may give
                `Blockwise(train_length // 2)`.
            document_starts: `[batch, length]`, where the document of each token starts: documents do not see one
                another.

        Returns:
            Without targets, logits `[batch, length, vocabulary]`. With targets, the mean over those that are scored of
            their loss in nats, a scalar to call `.backward()` on; 0 if none is.
        """
        if targets is None:
            self._check(ids, None)
            return F.linear(self.hidden(ids, mask, document_starts), self.output_weight)
        total, _ = self._score(ids, targets, mask, document_starts)
        return total / (targets != IGNORED).sum().clamp(min=1)

    @torch.no_grad()
    def losses(
        self, ids: Tensor, targets: Tensor, mask: Mask | None = None, document_starts: Tensor | None = None
    ) -> Tensor:
        """Return the loss of each target, `[batch, length]`, 0 where it is not scored; arguments as for `forward`."""
        return self._score(ids, targets, mask, document_starts)[1].view(targets.shape)

    def _score(
        self, ids: Tensor, targets: Tensor, mask: Mask | None, document_starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and each: the logits are never all in memory."""
        self._check(ids, targets)
        hidden = self.hidden(ids, mask, document_starts)
        return linear_cross_entropy(hidden.flatten(0, 1), self.output_weight, targets.flatten())

    def _check(self, ids: Tensor, targets: Tensor | None) -> None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"ids: expected integers [batch, length], got {describe(ids)}")
        if can_look(ids) and ids.numel():
            low, high = (int(end) for end in ids.aminmax())
            if low < 0 or high >= self.config.vocabulary:
                raise ValueError(
                    f"ids: expected tokens 0 … {self.config.vocabulary - 1}, got {low if low < 0 else high}"
                )
        if targets is not None and targets.shape != ids.shape:
            raise ValueError(f"targets: expected shape {list(ids.shape)} like ids, got {describe(targets)}")
