"""The HTTP face of the image server: one router file per API family, over an `ImageService`; no Ray in here."""
