"""`python -m tracepipe.native`: compiles the core, if it is not up to date."""

from tracepipe.native.build import main

if __name__ == "__main__":
    raise SystemExit(main())
