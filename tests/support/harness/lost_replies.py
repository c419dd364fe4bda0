"""Losing replies in the process of the test, as `LOST_REPLY_AT` does in a process of its own."""

from rota.infra import failpoints


def lose_reply(monkeypatch, spec):
    """Lose the reply at the failpoints of `spec`; returns a list of where one was lost, for the test to check."""
    plan, lost = failpoints.FaultPlan.parse({"LOST_REPLY_AT": spec}), []

    def after_send(name):
        try:
            plan.after_send(name)
        except failpoints.LostReply:
            lost.append(name)
            raise

    monkeypatch.setattr(failpoints, "after_send", after_send)
    return lost
