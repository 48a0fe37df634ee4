"""The doctor of post-training: are the foundations of a run right, before its first step."""

from fornax.tune.doctor.checkup import admit, consult, examine
from fornax.tune.doctor.findings import Finding, Outcome, paragraphs, table

__all__ = ["Finding", "Outcome", "admit", "consult", "examine", "paragraphs", "table"]
