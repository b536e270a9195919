"""The model of the learning designers: the library as a background, a Gaussian process over it, what to try next."""
