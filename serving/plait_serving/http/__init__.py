"""The HTTP API of the image server: one router file per API family, over an `ImageService`; no Ray here."""
