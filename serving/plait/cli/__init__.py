"""One module per sub-command; each has a `typer.Typer` called `app`."""
