"""Stable Diffusion 1.x, 2.x and XL: a UNet in two halves, CLIP, a VAE, ControlNets."""
