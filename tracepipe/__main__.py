"""`python -m tracepipe`: the command line where its script is not on the path."""

from tracepipe.cli import main

if __name__ == "__main__":
    main()
