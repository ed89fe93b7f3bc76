"""`python -m lengthen`, the same as the command `lengthen`."""

from lengthen.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
