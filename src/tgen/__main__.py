"""`python -m tgen` is `tgen`."""

from tgen.cli.app import main

if __name__ == "__main__":
    main()
