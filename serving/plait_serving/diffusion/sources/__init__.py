"""From what a configuration names to a folder with a model: hub ids, names of files, and how folders are written."""
