#!/bin/sh
# A command-line agent in a shell script: it needs sh, and python3 to read and write JSON and to speak HTTP.
# The prompt is the first argument, or comes on standard input.
set -eu
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
[ $# -gt 0 ] && prompt=$1 || prompt=$(cat)

cat >"$folder/ask.py" <<'PYTHON'
import json, os, sys, urllib.request
place, entry = sys.argv[1], json.loads(sys.argv[2])
opening = [{"role": "system", "content": "Do the task with the shell, then say done."}]
talk = json.load(open(place)) if os.path.exists(place) else opening
talk.append(entry)
command = {"type": "string", "description": "what to run"}
parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
function = {"name": "run", "description": "Run a shell command.", "parameters": parameters}
body = {"model": os.environ.get("AGENTRL_MODEL", "policy"), "messages": talk}
body["tools"] = [{"type": "function", "function": function}]
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=600)
said = json.load(reply)["choices"][0]["message"]
talk.append(said)
json.dump(talk, open(place, "w"))
calls = said.get("tool_calls") or []
if calls:
    # One call at a time keeps the script short; the policy learns to make one.
    print(calls[0]["id"])
    print(json.loads(calls[0]["function"]["arguments"]).get("command", ""))
else:
    print()
    print(said.get("content") or "")
PYTHON

json() { python3 -c 'import json, sys; print(json.dumps(dict(zip(sys.argv[1::2], sys.argv[2::2]))))' "$@"; }

next=$(json role user content "$prompt")
while :; do
    said=$(python3 "$folder/ask.py" "$folder/talk.json" "$next")
    call=$(printf '%s\n' "$said" | head -n 1)
    rest=$(printf '%s\n' "$said" | tail -n +2)
    if [ -z "$call" ]; then
        printf '%s\n' "$rest"
        exit 0
    fi
    result=$(sh -c "$rest" 2>&1 | head -c 4000) || true
    # In the frame that the environment's demonstrations show: a tiny model knows nothing else.
    next=$(json role tool tool_call_id "$call" content "<out>$result</out>")
done
