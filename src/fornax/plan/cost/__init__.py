"""The cost model: facts of a step and a topology to seconds.

`predict` takes a compiled program, whose schedule is known; `predict_step` what closed forms know.
Both time operations by the roofline and exchanges by `network.collective_seconds`.
"""
