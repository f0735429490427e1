"""`python -m parallel3d`: the same as the `parallel3d` command."""

from parallel3d.cli.main import main

if __name__ == "__main__":
    main()
