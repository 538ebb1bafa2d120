"""Run the command line with `python -m metaq`."""

from metaq.cli.main import main

if __name__ == "__main__":
    main()
