"""``python -m kdagen``: the same as the `kdagen` command."""

from kdagen.cli import main

if __name__ == "__main__":
    main(prog_name="kdagen")
