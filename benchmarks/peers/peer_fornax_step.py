"""Contestant: Fornax's compiled decode step over and over, without scheduler, text or sockets.

What the engine and the server add to it is their overhead.
"""

from _protocol import Record, serve
from peer_fornax import Fornax


class Step(Fornax):
    """The engine generates once; then the steps in which all rows decode are run over again.

    So the contexts grow as they do in the engine, and attention costs the same.
    """

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        from fornax.llm.sampling_params import SamplingParams

        engine, admission = self._parts.engine, self._parts.input_processor
        room = self._parts.limits.max_model_len - len(prompts[0])
        most = min(new + len(prompts), room)  # more than `new`: rows do not begin together
        params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
        for row, prompt in enumerate(prompts):
            engine.add(admission.request(prompt, params, request_id=str(row)))
        plans = []
        while engine.has_work:
            engine.step()
            if engine._inflight is None:
                continue
            plan = engine._inflight[0].plan
            if len(plan.samples) == len(prompts) and all(e.count == 1 for e in plan.entries):
                plans.append(plan)
        ticket = None
        for plan in plans[:new]:
            bucket = engine.runner.forward(plan, {})
            if ticket is not None:
                record.step(ticket.tokens())
            ticket = engine.runner.sample(plan, bucket, {}, set(), False, {})
        if ticket is not None:
            record.step(ticket.tokens())


if __name__ == "__main__":
    serve(Step)
