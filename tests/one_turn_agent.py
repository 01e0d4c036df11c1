"""An agent with one request, for runs that combine plugins."""

import json
import urllib.request


def agent(task):
    body = json.dumps({"messages": [{"role": "user", "content": task.row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{task.base_url}/chat/completions", body, headers)):
        return None
