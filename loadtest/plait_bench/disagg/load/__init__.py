"""What the systems are asked: packages, bodies, open and closed loops, and the search for goodput."""
