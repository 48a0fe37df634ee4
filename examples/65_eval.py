"""Judge completions with a reward of your own and a verifier; see how sure the figures are.

python examples/65_eval.py
"""

import tempfile
from pathlib import Path

from fornax.data import train_bpe
from fornax.evaluate import EvaluateConfig, evaluate, pass_at_k
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.rewards import RewardPool, RewardSpec, Sample
from fornax.tune.rollout import SampleSettings

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
(folder / "my_rewards.py").write_text(
    """
def brief(completion):
    return 1.0 if len(completion) < 30 else 0.0
"""
)

# 1. Rewards by themselves: processes that may crash or hang without harm.
rewards = [
    RewardSpec(function="math"),
    RewardSpec(function=f"{folder / 'my_rewards.py'}:brief", weight=0.1),
]
with RewardPool(rewards) as pool:
    samples = [
        Sample("What is half of one?", r"It is \boxed{\frac{1}{2}}.", {"answer": "0.5"}),
        Sample("What is half of one?", "I think that it is two, but who knows.", {"answer": "0.5"}),
    ]
    for score in pool.score(samples):
        print(f"{score.total:.1f}", dict(score.parts))

# 2. pass@k from counts: of 10 samples of each of three problems, 1, 5 and 0 passed.
for k in (1, 5):
    print(f"pass@{k} = {pass_at_k([10, 10, 10], [1, 5, 0], k)}")

# 3. A model, whole: bits per byte of a text, and judged completions.
text = "def f(x):\n    return x + 1\n\n"
tokenizer = train_bpe([text * 20], vocab_size=280)
tokenizer.save(folder / "tokenizer")
config = DecoderConfig(
    vocab_size=280,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    max_position_embeddings=128,
)
save_pretrained(create_decoder(config), folder / "hf", folder / "tokenizer")  # stands for yours
(folder / "text.txt").write_text(text)
(folder / "prompts.jsonl").write_text('{"prompt": "def f(x):\\n"}\n{"prompt": "def g(y):\\n"}\n')

found = evaluate(
    EvaluateConfig(
        model=str(folder / "hf"),
        text=(str(folder / "text.txt"),),
        prompts=str(folder / "prompts.jsonl"),
        reward=("python_parses", f"{folder / 'my_rewards.py'}:brief"),
        sampling=SampleSettings(n=2, temperature=1.0, max_tokens=8),
        max_num_seqs=4,
    ),
    out=folder / "eval",
)
[model] = found.generative
print("bits per byte", found.perplexity[model].bits_per_byte)
print("reward", found.generative[model].reward, dict(found.generative[model].parts))
print(sorted(path.name for path in (folder / "eval").iterdir()))
scratch.cleanup()
