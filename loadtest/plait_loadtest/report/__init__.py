"""The outputs of a run: a JSON document, a table, raw rows, one HTML page, a locustfile."""
