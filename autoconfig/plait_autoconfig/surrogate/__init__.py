"""What the learning designers believe: the library as a background, a Gaussian process over it, what to try next."""
