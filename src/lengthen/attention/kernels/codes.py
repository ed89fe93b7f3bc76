"""The numbers that tell the kernels what a call has: its mask, its bias, and where reach knows norms from."""

# Which keys a query sees. LISTED: two numbers a query, from memory (padded and packed sequences).
CAUSAL, WINDOW, BLOCKWISE, FULL, LISTED = range(5)

# What a score gets added. LEVEL: a table whose values are all the same from some distance on.
NONE, LINEAR, TABLE, LEVEL = range(4)

# Where reach knows from how long keys are: it does not ask, a pass over them (ball.py), or the caller's word.
NO_REACH, MEASURED, GIVEN = range(3)
