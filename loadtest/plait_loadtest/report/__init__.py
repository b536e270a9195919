"""What a run is written as: a JSON document, a table, raw rows, one HTML page, a locustfile."""
