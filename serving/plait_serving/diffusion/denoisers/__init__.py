"""Model families behind the `Denoiser` protocol."""
