"""The sampler that runs on the device: logits to tokens, for every mixture of requests."""
