"""Real agents for ``agents.py``: runs one library's agent for many samples. Needs only that library; started by ``agents.py``.

Reads one JSON object per line, ``{"base_url", "api_key", "question", "number"}``, and writes one line per finished sample. With ``--one`` it is
an agent of ``--agent``: it works on the row of its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def add(a: int, b: int, note: str = "", exact: bool = True) -> str:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
        note: a remark that is repeated.
        exact: whether the sum is exact.
    """
    return f"{a + b} {note}<|im_end|>"  # a tool's output that looks like the end of a message


async def openai_agents(task: dict[str, Any], chat: bool = False) -> str:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"])
    kind = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
    agent = Agent(
        name="adder",
        instructions="Add numbers with the tool.",
        tools=[function_tool(add, failure_error_function=lambda context, error: f"error: {error}")],
        model=kind(model="default", openai_client=client),
        model_settings=ModelSettings(max_tokens=400),
    )
    first = await Runner.run(agent, task["question"], max_turns=12)
    second = await Runner.run(
        agent, [*first.to_input_list(), {"role": "user", "content": "And once more?"}], max_turns=12
    )
    return str(second.final_output)


async def langgraph(task: dict[str, Any]) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="default", base_url=task["base_url"], api_key=task["api_key"], max_tokens=400)
    agent = create_react_agent(model, [tool(add)], prompt="Add numbers with the tool.")
    state = await agent.ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 40})
    state = await agent.ainvoke({"messages": [*state["messages"], ("user", "And once more?")]}, {"recursion_limit": 40})
    return str(state["messages"][-1].content)


def smolagents(task: dict[str, Any]) -> str:
    from smolagents import CodeAgent, LogLevel, OpenAIServerModel

    model = OpenAIServerModel("default", api_base=task["base_url"], api_key=task["api_key"], max_tokens=400)
    agent = CodeAgent(tools=[], model=model, max_steps=4, verbosity_level=LogLevel.OFF)
    return str(agent.run(task["question"]))


async def main(library: str) -> None:
    loop = asyncio.get_running_loop()
    pool, slots = ThreadPoolExecutor(8), asyncio.Semaphore(8)

    async def work(task: dict[str, Any]) -> None:
        async with slots:
            try:
                if library == "smolagents":
                    result = await loop.run_in_executor(pool, smolagents, task)
                elif library == "langgraph":
                    result = await langgraph(task)
                else:
                    result = await openai_agents(task, chat=library == "openai-agents-chat")
                line = {"number": task["number"], "result": result[:200]}
            except Exception as error:
                line = {"number": task["number"], "error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(line), flush=True)

    tasks = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tasks.append(asyncio.ensure_future(work(json.loads(line))))
    await asyncio.gather(*tasks)


async def one(library: str) -> None:
    """Work on one row; the result is its reward, 1 if the agent finished."""
    row = json.loads(sys.stdin.readline())
    task = {
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "question": row["prompt"],
        "number": row["sample"],
    }
    try:
        if library == "smolagents":
            smolagents(task)
        elif library == "langgraph":
            await langgraph(task)
        else:
            await openai_agents(task, chat=library == "openai-agents-chat")
        print(1.0)
    except Exception as error:  # a model that never calls a tool, or a conversation that is too long
        print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
        print(0.0)


if __name__ == "__main__":
    asyncio.run(one(sys.argv[1]) if "--one" in sys.argv else main(sys.argv[1]))
