"""`python -m strata` is the same program as `strata`."""

from strata.cli import main

if __name__ == "__main__":
    main()
