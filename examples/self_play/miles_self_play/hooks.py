"""Hook that adds the second policy to the run."""

from miles_core.plugin import Policy, Run, hookimpl


class SelfPlay:
    """Adds a policy with the first one's checkpoint."""

    @hookimpl
    def on_start(self, run: Run) -> None:
        run.policies.append(Policy(hf_checkpoint=run.policy.hf_checkpoint, name="guesser"))
