"""From what a configuration names to a folder with a model: hub ids, and how folders are written."""
