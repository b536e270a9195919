"""What commands do without a server: make images, rank, package, list and check."""
