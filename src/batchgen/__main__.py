"""`python -m batchgen`."""

from batchgen.cli.main import main

if __name__ == "__main__":
    main()
