"""`python -m lengthen`, the same as the command `lengthen`."""

import sys

try:
    from lengthen.cli.main import main
except KeyboardInterrupt:
    print("\nlengthen: stopped", file=sys.stderr)
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(main())
