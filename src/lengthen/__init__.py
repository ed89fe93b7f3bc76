"""Train short, test long: every position method behind one exact, fast attention call."""
