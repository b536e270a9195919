"""`python -m plait_autoconfig.jobs DESCRIPTOR` is the measuring process (`runner`).

Imports nothing at module level: processes that a measurer starts (the load generator's, for every trial) import
their parent's main module again, unless it has this name.
"""

import sys

if __name__ == "__main__":
    from plait_autoconfig.jobs.runner import main

    main(int(sys.argv[1]))
