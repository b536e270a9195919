"""``python -m plait_autoconfig.jobs DESCRIPTOR`` is the measuring process (`child`).

Imports nothing by itself: processes that a measurer starts (the load generator's, for every trial) import the main
module of their parent again, but not one of this name.
"""

import sys

if __name__ == "__main__":
    from plait_autoconfig.jobs.child import main

    main(int(sys.argv[1]))
