"""The load on the systems: packages, bodies, open and closed loops, and the search for goodput."""
