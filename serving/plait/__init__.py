"""The user-facing side of plait: the command, the composed configuration and the Ray Serve application."""
