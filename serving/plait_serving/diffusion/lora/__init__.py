"""LoRA sets: where files come from, what is in them, the host cache, and the merge into live weights."""
