"""``python -m adagc_jax.replay``: the same as ``adagc-replay``."""

import sys

from adagc_jax.replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
