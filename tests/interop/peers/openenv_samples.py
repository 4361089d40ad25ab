"""Three OpenEnv servers in one process of openenv's own environment: agentrl's files, and two environments written with
openenv itself, one with a typed action, one with MCP tools.  python openenv_samples.py PORT PORT PORT
"""

import asyncio
import os
import sys

os.environ["ENABLE_WEB_INTERFACE"] = "false"

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from agentrl.interop.openenv_server import application


class Move(Action):
    """Move left or right."""

    direction: str


class Seen(Observation):
    position: int
    goal: int


class Walk(Environment):
    """Walk to the goal, which the seed decides; 10 points for it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.position, self.goal, self.steps = 0, 1 + (seed or 0) % 3, 0
        return Seen(position=0, goal=self.goal, done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.position += 1 if action.direction == "right" else -1
        self.steps += 1
        done = self.position == self.goal
        return Seen(position=self.position, goal=self.goal, done=done, reward=10.0 if done else 0.0)

    @property
    def state(self):
        return State(episode_id="walk", step_count=self.steps)


class Echo(MCPEnvironment):
    """Echo what is said; every call is rewarded, as the upstream sample does."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Say it back."""
            return message

        super().__init__(server)
        self.count = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return State(episode_id="echo", step_count=self.count)


async def main(ports):
    apps = [
        application("files", sessions=16),
        create_app(Walk, Move, Seen, "walk", 16),
        create_app(Echo, CallToolAction, CallToolObservation, "echo", 16),
    ]
    servers = [
        uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
        for app, port in zip(apps, ports, strict=True)
    ]
    await asyncio.gather(*(server.serve() for server in servers))


asyncio.run(main([int(port) for port in sys.argv[1:]]))
