"""Engine and trainer of a toy run, built and synced, without the loop."""

import asyncio

import pytest


@pytest.fixture
def with_parts(tmp_path):
    """``with_parts(body, plugins, **flags)``: run ``await body(run, parts)`` on parts synced as version 0."""
    from miles_core.config.load import load
    from miles_core.run.make import make_run
    from miles_core.run.parts import build_parts
    from miles_core.run.prepare import apply_plan, prepare
    from miles_testing.toy import toy_arguments

    def call(body, plugins=(), **options):
        options = {"emulate_precision": True, "rollout_max_response_len": 16, **options}
        config = load(toy_arguments(plugins, tmp_path, **options))
        plan, catalogue = prepare(config)
        run = make_run(apply_plan(config, plan), plan, catalogue, tmp_path)

        async def main():
            async with build_parts(run) as (parts,):
                run.policy.version = (await parts.learner.push(0)).version
                return await body(run, parts)

        return asyncio.run(main())

    return call
