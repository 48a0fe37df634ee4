"""Tasks the trainer can drive. Each says what a loss is; none owns a loop."""

from fornax.train.tasks.pretrain import next_token_loss, pretrain_task

__all__ = ["next_token_loss", "pretrain_task"]
