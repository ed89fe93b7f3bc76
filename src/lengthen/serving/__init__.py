"""A model behind OpenAI's completions interface: what `lengthen serve` is made of.

engine.py     continuous batching: a thread that reads prompts and decodes them together; no web code
request.py    a request's JSON, checked: every error names the parameter
answer.py     tokens into the pieces of an answer: text, logprobs, why it ended
app.py        the web server: /v1/completions, /v1/models, /stats and the page at /; needs the extra `serve`
page.html     a prompt, its text as it comes, the cache's size and the tokens/s
"""
