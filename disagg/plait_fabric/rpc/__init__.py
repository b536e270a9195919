"""Request and reply over channels: one client, one server."""
