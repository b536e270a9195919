"""From what `torch.export` traced to the operators of a program."""
