"""Stage `text`: a byte-pair tokenizer learnt from the concept names, and a CLIP text encoder that spells images.

A network this small learns a prompt's image slowly through the denoiser's loss alone. So the encoder is
trained first, by itself: in the padding after the prompt, position `16 + k` must carry (through one linear
map) the `k mod 16`-th of the sixteen 4x4 patches of the image's latents, the empty prompt those of the mean
image. After that it is frozen, and the denoiser learns to look the patches up.
"""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from starter_training.loop import SEED, Loss

VOCABULARY = 1400
WIDTH = 96
LENGTH = 77
WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"
FIRST_SLOT = 16
SLOTS = 16
PATCH = 64
SLOT_WEIGHT = 0.3


def build_tokenizer(names: tuple[str, ...]) -> CLIPTokenizer:
    """Learn a CLIP-style byte-pair vocabulary of whole names' pieces; the end token has the highest id."""
    pattern = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE(end_of_word_suffix=WORD_END, unk_token=END))
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
    tokens = [*dict.fromkeys(tokens), START, END]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, model_max_length=LENGTH)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return the untrained encoder; same weights every time."""
    torch.manual_seed(SEED + 1)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=512,
        projection_dim=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        hidden_act="quick_gelu",
    )
    return CLIPTextModel(config)


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Return token ids like Stable Diffusion's: `int64[n, 77]`, padded and cut to 77."""
    batch = tokenizer(prompts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
    return torch.as_tensor(batch.input_ids)


def embed(encoder: CLIPTextModel, ids: Tensor) -> Tensor:
    """Return prompt embeddings `float32[n, 77, WIDTH]` of token ids `int64[n, 77]`."""
    return torch.as_tensor(encoder(ids)[0])


def patches(latents: Tensor) -> Tensor:
    """Split `[n, 4, 16, 16]` into sixteen 4x4 patches, row by row: `[n, 16, 64]`."""
    return latents.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(len(latents), SLOTS, PATCH)


def spelling_loss(encoder: CLIPTextModel, head: nn.ModuleDict, ids: Tensor, latents: Tensor, batch: int) -> Loss:
    """Return a loss: the error of the patches read from the padding, and of identifying a position's slot.

    `ids[n]` (one more than `latents`) is the empty prompt; its image is the mean of all.
    """
    wanted = patches(torch.cat([latents, latents.mean(0, keepdim=True)]))
    slot = (torch.arange(FIRST_SLOT, LENGTH) - FIRST_SLOT) % SLOTS
    labels = 4.0 * nn.functional.one_hot(slot, SLOTS).float()

    def loss(_: int, generator: torch.Generator) -> Tensor:
        rows = torch.randperm(len(ids), generator=generator)[:batch]
        states = embed(encoder, ids[rows])[:, FIRST_SLOT:]
        image = nn.functional.mse_loss(head["patch"](states), wanted[rows][:, slot])
        return image + SLOT_WEIGHT * nn.functional.mse_loss(head["slot"](states), labels.expand(len(rows), -1, -1))

    return loss


def build_head() -> nn.ModuleDict:
    """Return the linear maps from a token's state to a patch and to the slot's number."""
    torch.manual_seed(SEED + 5)
    return nn.ModuleDict({"patch": nn.Linear(WIDTH, PATCH), "slot": nn.Linear(WIDTH, SLOTS)})
