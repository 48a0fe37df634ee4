"""Low-rank adapters on any NNX model: LoRA, DoRA, rsLoRA, QLoRA, and PEFT's files."""
