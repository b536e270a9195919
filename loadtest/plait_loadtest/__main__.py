"""`python -m plait_loadtest`: the load tester without the rest of plait."""

from plait_loadtest.cli import main

if __name__ == "__main__":
    main()
