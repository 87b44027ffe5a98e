import sys

from lightning_robustness.cli.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
