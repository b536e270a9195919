"""Messages between clients, CNs and HNs, and what makes a request valid."""
