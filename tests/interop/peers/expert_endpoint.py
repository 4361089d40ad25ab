"""A chat endpoint that plays the expert of an environment: python expert_endpoint.py NAME LEVEL PORT."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agentrl import envs

kind = envs.load(sys.argv[1])
scripts = {}
for index in range(50):
    task = kind().task("train", int(sys.argv[2]), index)
    scripts[task.prompt] = kind().expert(task)


def text(content):
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def send(self, content, kind="application/json"):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send({"object": "list", "data": [{"id": "expert", "object": "model", "created": 0, "owned_by": "us"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        talk = body["messages"]
        prompt = next(text(m["content"]) for m in talk if m["role"] == "user")
        script = scripts.get(prompt, ["I do not know this task."])
        done = sum(m["role"] == "assistant" for m in talk)
        action = script[done] if done < len(script) else "done"
        message = {"role": "assistant", "content": action if isinstance(action, str) else None}
        if not isinstance(action, str):
            function = {"name": action.name, "arguments": json.dumps(dict(action.arguments))}
            message["tool_calls"] = [{"id": f"call_{done}", "type": "function", "function": function}]
        finish = "stop" if isinstance(action, str) else "tool_calls"
        head = {"id": "c", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        if body.get("stream"):
            delta = {**message, "tool_calls": [{**c, "index": 0} for c in message.get("tool_calls", [])]}
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            part = {**head, "object": "chat.completion.chunk", "choices": [choice], "usage": usage}
            self.send(f"data: {json.dumps(part)}\n\ndata: [DONE]\n\n".encode(), "text/event-stream")
        else:
            choice = {"index": 0, "message": message, "finish_reason": finish}
            self.send({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
