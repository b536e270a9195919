"""The image queue: how much may wait, whose turn it is, which group runs next, what work will take and what it took."""
