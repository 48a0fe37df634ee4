"""Contestant: Fornax's compiled decode step over and over, without scheduler, text or sockets.

What the engine and the server add to it is their overhead.
"""

from _protocol import Record, serve
from peer_fornax import Fornax


class Step(Fornax):
    """The engine brings every row to where it decodes; then one and the same plan is repeated."""

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        from fornax.llm.sampling_params import SamplingParams

        engine, admission = self._parts.engine, self._parts.admission
        room = self._parts.limits.max_model_len - len(prompts[0])
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        for row, prompt in enumerate(prompts):
            engine.add(admission.request(prompt, params, request_id=str(row)))
        plan = None
        while plan is None or any(entry.count > 1 for entry in plan.entries):
            engine.turn()
            ticket, _ = engine._inflight
            plan = ticket.plan if len(ticket.plan.samples) == len(prompts) else None
        engine.drain()
        ticket = None
        for _ in range(new):
            bucket = engine.runner.forward(plan, {})
            if ticket is not None:
                record.step(ticket.tokens())
            ticket = engine.runner.sample(plan, bucket, {}, set(), False, {})
        record.step(ticket.tokens())
        for row in range(len(prompts)):
            engine.abort(str(row))


if __name__ == "__main__":
    serve(Step)
