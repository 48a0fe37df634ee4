"""Contestant: Fornax's compiled decode step over and over, without scheduler, text or sockets.

What the engine and the server add to it is their overhead.
"""

from _protocol import Record, serve
from peer_fornax import Fornax

from fornax.llm.runner import RunnerOutput


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
            if len(plan.samples) == len(prompts) and engine.runner.decodes(plan):
                plans.append(plan)
        left, running = new, []
        for plan in plans:
            if left <= 0:
                break
            left -= plan.steps
            running.append(engine.runner.decode(plan))
            if len(running) > 1:  # the device is a call ahead, as in the engine
                self._record(running.pop(0), record)
        for ticket in running:
            self._record(ticket, record)

    @staticmethod
    def _record(ticket: RunnerOutput, record: Record) -> None:
        for tokens in zip(*ticket.tokens(), strict=True):
            record.step(list(tokens))


if __name__ == "__main__":
    serve(Step)
