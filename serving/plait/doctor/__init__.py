"""The checks of `plait doctor`. Each check is a small function that returns findings."""
