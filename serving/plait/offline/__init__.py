"""What commands do without a server: images, rankings, packages, listings, checks."""
