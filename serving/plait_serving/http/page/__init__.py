"""The page at `/` and the interactive documentation at `/docs`: files of the package under a strict policy."""
