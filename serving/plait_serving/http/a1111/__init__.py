"""A1111's API (`/sdapi/v1`) over the image service, for clients that know no other."""
