"""An agent of two turns for the tests of players; it has nothing but the standard library, and tells its key."""

import json
import os
import urllib.request
from typing import Any


def ask(path: str, body: Any = None) -> Any:
    """Ask the endpoint."""
    url, headers = os.environ["OPENAI_BASE_URL"], {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", data, headers), timeout=200))


if __name__ == "__main__":
    opening = ask("tools")
    talk = opening["messages"]
    for text in ("Go on.", "Thanks!"):
        said = ask("chat/completions", {"messages": talk, "tools": opening["tools"], "max_tokens": 20})
        talk += [said["choices"][0]["message"], {"role": "user", "content": text}]
    print("my key is", os.environ["OPENAI_API_KEY"])
