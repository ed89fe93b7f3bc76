"""The text of the page: what each section shows and how its numbers are measured."""

from __future__ import annotations

ABOUT = {
    "perplexity": (
        "Perplexity by length",
        "How well each model predicts text when it reads more of it at once than in training. A curve that falls or "
        "stays level beyond the training length extrapolates.",
    ),
    "resolution": (
        "Attention resolution",
        "How clearly attention tells near from far (LEX): R(s) = Σ e^s[i]·(e^s[i] − e^s[i+1]) / (Σ e^s[i])², where "
        "s[i] is a layer's mean score at distance i; the model's is the mean over its layers. Where it drops beyond "
        "the training length, order is lost.",
    ),
    "positions": (
        "Loss by position",
        "The mean loss of tokens by their place in the input, in buckets. A longer input cuts the text less often, so "
        "fewer tokens have little context: that part of its gain needs no use of distant tokens.",
    ),
    "reach": (
        "Reach",
        "How many keys, on average, a query of each head reads back before the rest are proved to weigh less than "
        "rounding. The shade is the fraction of the causal score matrix that is read. Only methods with a bias "
        "have such a bound.",
    ),
    "distance": (
        "Attention by distance",
        "The fraction of its attention that each head spends in buckets of distance. Rows are layer.head; a column "
        "goes from its distance to the next one's.",
    ),
    "induction": (
        "Induction",
        "How the loss of random tokens changes when the model reads them a second time: below 0, it copies. That takes "
        "a head that attends to the token before, and in a later layer one that attends to the token after an earlier "
        "occurrence; the table has the strongest of each layer.",
    ),
    "longppl": (
        "LongPPL",
        "Perplexity over key tokens: those whose likelihood a long context raises by e² or more above that with a "
        "short one, and to e⁻² at least (Fang et al., 2024), chosen by the model itself or by a judge. Curves can be "
        "compared if one judge chose for all of them.",
    ),
    "tasks": (
        "Tasks by length",
        "How many questions with an exact answer a model answers, by the length of the text that holds what is asked "
        "for. An answer is right if greedy generation would write it, token by token.",
    ),
    "depths": (
        "Tasks by length and depth",
        "The same in per cent, by where in the text stands what is asked for: 0 is its beginning, 1 its end.",
    ),
    "speed": (
        "Speed and memory",
        "Tokens scored per second, forward passes alone, and the peak of memory beside the model, by length. Runs on "
        "other machines, or beside other work, are not comparable.",
    ),
    "runs": ("Runs", "Every measurement, and how it was made."),
    "papers": ("The papers", "Their tables are data of the package, measured by their authors on their data."),
}
HOW = (
    "Perplexity is e to the mean loss, in nats, over the tokens scored, the same ones at every length. A difference "
    "between two lengths, or two models, is paired over 64 segments of the same text, and its standard error is over "
    "these. “Beside” a paper, curves are ratios: "
    "perplexity over that at the training length (where a curve has none, the plain value). What a token sees:"
)
READING = (
    "Point at a point or tap it for its values; click a curve or its name to single it out, double-click for all. "
    "Keys: Tab to the figure, arrows from point to point, Enter, Escape."
)
PROTOCOLS = {
    "nonoverlapping": "the text is cut into pieces of the length; a token sees what stands before it in its piece.",
    "sliding": "windows of the length, each a stride on from the last; the new tokens are scored, others are context.",
    "blockwise": "pieces of the length; a token sees its own block up to itself, and the whole block before.",
    "window": "pieces of the length; a token sees itself and a fixed number of tokens before it.",
}
OTHER_TEXTS = (
    "These numbers are from different texts: the data's fingerprint or the split differs. Their perplexities cannot be "
    "compared; the ratios to the value at the training length can."
)
