"""What Stable Diffusion 3 and FLUX.1 share: schedules of flow models, text by CLIP and T5, a step, a model's folder."""
