"""A byte-pair tokenizer learnt from the concept names, and the small CLIP text encoder that reads its tokens."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from plait_serving.starter.train.loop import SEED

VOCABULARY = 1400
WIDTH = 96
LENGTH = 77
WORD_END = "</w>"


def build_tokenizer(names: tuple[str, ...]) -> CLIPTokenizer:
    """Learn a CLIP-style byte-pair vocabulary of whole names' pieces; the end token has the highest id."""
    pattern = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE(end_of_word_suffix=WORD_END, unk_token="<|endoftext|>"))
    learner.normalizer, learner.pre_tokenizer = pattern.normalizer, pattern.pre_tokenizer
    letters = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        names,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=letters, end_of_word_suffix=WORD_END, show_progress=False
        ),
    )
    state = json.loads(learner.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]
    # Every byte also as the end of a word: otherwise a lone letter that no name ends with would be unknown.
    tokens = [*state["vocab"], *(letter + end for letter in sorted(letters) for end in ("", WORD_END))]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, model_max_length=LENGTH)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The untrained encoder; same weights every time."""
    torch.manual_seed(SEED + 1)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=256,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        hidden_act="quick_gelu",
    )
    return CLIPTextModel(config)


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Token ids as Stable Diffusion makes them: ``int64[n, 77]``, padded and cut to 77."""
    batch = tokenizer(prompts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    return torch.as_tensor(batch.input_ids)


def embed(encoder: CLIPTextModel, ids: Tensor) -> Tensor:
    """Prompt embeddings ``float32[n, 77, WIDTH]`` of token ids ``int64[n, 77]``."""
    return torch.as_tensor(encoder(ids)[0])
