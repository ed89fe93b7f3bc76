"""What the page says in prose: what a figure shows, how its numbers are made, and the commands that make them."""

from __future__ import annotations

ABOUT = {
    "perplexity": (
        "Perplexity by length",
        "How well each model predicts text when it reads more of it at once than in training. Left of the mark are "
        "lengths it was trained at; right of it, lengths it never saw. A curve that falls or stays level "
        "extrapolates.",
    ),
    "runs": ("Runs", "What was measured: the model of each run, how long it was trained, and how fast."),
    "resolution": (
        "Attention resolution",
        "How clearly attention tells near from far (LEX): R(s) = Σ e^s[i]·(e^s[i] − e^s[i+1]) / (Σ e^s[i])², where "
        "s[i] is a layer's mean score at distance i; the model's is the mean over its layers. 0 tells nothing apart. "
        "Where it drops beyond the training length, order is lost.",
    ),
    "positions": (
        "Loss by position",
        "The mean loss of tokens by their place in the input, in buckets. A model that uses more context keeps "
        "falling; one that only gains from having fewer early tokens, which have little context, is level.",
    ),
    "curse": (
        "Where the gain of a longer input comes from",
        "A longer input cuts the text less often, so fewer tokens stand early, with little context. That part of the "
        "gain needs no use of distant tokens; what more context gives, measured with sliding windows over the same "
        "tokens, does. The two add up to the gain; either may be negative.",
    ),
    "reach": (
        "Reach",
        "How many keys, on average, a query of each head has to read back before the rest are proved to weigh less "
        "than rounding. The shade is the share of the causal score matrix that is read. Only methods with ALiBi's bias "
        "have such a bound.",
    ),
    "distance": (
        "Attention by distance",
        "Where attention goes: the share of its attention that each head spends in buckets of distance. Rows are "
        "layer.head; a column goes from its distance to the next one's. The shade grows with the root of the share.",
    ),
    "recall": (
        "Recall by distance",
        "How often the model, asked for a value that was told once, this many tokens before, gives it. Bars are one "
        "standard error.",
    ),
    "speed": ("Speed and memory", "Tokens scored a second, and the peak of memory, by length."),
    "speed-how": (
        "",
        "Wall clock of scoring, forward passes alone, over all tokens of the measurement; memory is the peak beside "
        "the model while scoring, where the device can tell. Runs on other machines, or beside other work, are not "
        "comparable.",
    ),
    "papers": (
        "",
        "The tables these papers print, as data of the package. They were measured by their authors, on their data.",
    ),
}

RELATIVE = (
    "The papers' corpora, vocabularies and models differ from these, so their perplexities cannot stand on the same "
    "axis. Their curves are therefore shown as ratios: perplexity over that at the training length, against length "
    "over training length. Ticking the box changes the figure to that measure; 1 at ×1 is every model's own "
    "starting point. A curve that was not measured at the training length is divided by the plain value there."
)

PROTOCOLS = {
    "": (
        "Perplexity is e to the mean loss, in nats, over all tokens scored; its standard error is that of the loss "
        "times the perplexity. That error is over documents; curves of the same text share most of it, so they differ "
        "more surely than their bars suggest. Perplexity a word and bits a byte count a document that was scored in "
        "part with its share. At every length the same text is scored, each token once. What differs is what a token "
        "sees:"
    ),
    "nonoverlapping": "the text is cut into pieces of the length; a token sees what stands before it in its piece.",
    "sliding": "windows of the length, each a stride on from the last; the new tokens are scored, others are context.",
    "blockwise": "pieces of the length; a token sees its own block up to itself, and the whole block before.",
    "window": "pieces of the length; a token sees itself and a fixed number of tokens before it.",
}

MISSING = {
    "resolution": "Attention resolution",
    "positions": "Loss by position",
    "reach": "Reach",
    "distance": "Attention by distance",
}  # analyses that any model, or for reach any with ALiBi, can have; recall needs one that was trained on it
